// What the engines share: transfers, the queue of their blocks, and who waits for what.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "fullspeed.h"

struct Transfer {
    int64_t num_blocks_left;
    int32_t error = 0;  // the first one
};

// A part of a transfer that one system call may move, or the rest of one that was moved in part.
struct Block {
    Transfer *transfer;
    bool is_write;
    int32_t descriptor;
    char *memory;
    int64_t nbytes, offset;

    Block rest(int64_t done) const {
        return {transfer, is_write, descriptor, memory + done, nbytes - done, offset + done};
    }
};

struct FileIo {
    explicit FileIo(int64_t block_bytes) : block_bytes(block_bytes) {}
    virtual ~FileIo() = default;

    int64_t submit(Block whole);
    int32_t wait(int64_t ticket);

  protected:
    // Notes that a block has been moved, or failed. Called with `mutex` held.
    void finish(const Block &block, int32_t error);
    // Lets the engine's threads come to an end once nothing is left to do.
    void stop();

    const int64_t block_bytes;
    std::mutex mutex;
    std::condition_variable has_work, has_result;
    std::deque<Block> blocks;
    bool is_stopping = false;

  private:
    std::unordered_map<int64_t, std::unique_ptr<Transfer>> transfers;
    int64_t num_submitted = 0;
};

// Throws an errno where the kernel or the container forbids it.
std::unique_ptr<FileIo> make_ring(int32_t depth, int64_t block_bytes);

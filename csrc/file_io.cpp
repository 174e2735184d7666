// File transfers: the queue, and the engine whose threads each make one blocking system call at a time.
#include "file_io.h"

#include <cerrno>
#include <unistd.h>

#include <algorithm>
#include <vector>

int64_t FileIo::submit(Block whole) {
    const int64_t num_blocks = (whole.nbytes + block_bytes - 1) / block_bytes;
    auto transfer = std::make_unique<Transfer>(Transfer{num_blocks});
    whole.transfer = transfer.get();
    std::lock_guard lock(mutex);
    for (int64_t begin = 0; begin < whole.nbytes; begin += block_bytes) {
        Block block = whole.rest(begin);
        block.nbytes = std::min(block_bytes, block.nbytes);
        blocks.push_back(block);
    }
    has_work.notify_all();
    transfers.emplace(++num_submitted, std::move(transfer));
    return num_submitted;
}

int32_t FileIo::wait(int64_t ticket) {
    std::unique_lock lock(mutex);
    const auto found = transfers.find(ticket);
    if (found == transfers.end()) return EINVAL;
    Transfer &transfer = *found->second;
    has_result.wait(lock, [&] { return transfer.num_blocks_left == 0; });
    const int32_t error = transfer.error;
    transfers.erase(ticket);
    return error;
}

void FileIo::finish(const Block &block, int32_t error) {
    if (error && !block.transfer->error) block.transfer->error = error;
    if (--block.transfer->num_blocks_left == 0) has_result.notify_all();
}

void FileIo::stop() {
    std::lock_guard lock(mutex);
    is_stopping = true;
    has_work.notify_all();
}

namespace {

// Moves a block, however many calls that takes. Returns 0, an errno or FILE_ENDED.
int32_t move(Block block) {
    while (block.nbytes > 0) {
        const ssize_t done = block.is_write ? pwrite(block.descriptor, block.memory, size_t(block.nbytes), block.offset)
                                            : pread(block.descriptor, block.memory, size_t(block.nbytes), block.offset);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return errno;
        if (done == 0) return block.is_write ? ENOSPC : FILE_ENDED;
        block = block.rest(done);
    }
    return 0;
}

class Threads final : public FileIo {
  public:
    Threads(int32_t depth, int64_t block_bytes) : FileIo(block_bytes) {
        for (int32_t i = 0; i < depth; i++) team.emplace_back([this] { work(); });
    }

    ~Threads() override {
        stop();
        for (std::thread &thread : team) thread.join();
    }

  private:
    void work() {
        std::unique_lock lock(mutex);
        while (true) {
            has_work.wait(lock, [this] { return is_stopping || !blocks.empty(); });
            if (blocks.empty()) return;
            const Block block = blocks.front();
            blocks.pop_front();
            lock.unlock();
            const int32_t error = move(block);
            lock.lock();
            finish(block, error);
        }
    }

    std::vector<std::thread> team;
};

}  // namespace

FileIo *fs_io_create(Engine engine, int32_t depth, int64_t block_bytes, int32_t *error) {
    try {
        if (engine == io_uring) return make_ring(depth, block_bytes).release();
        return new Threads(depth, block_bytes);
    } catch (int32_t found) {
        *error = found;
    } catch (const std::exception &) {
        *error = EAGAIN;  // no more threads
    }
    return nullptr;
}

void fs_io_destroy(FileIo *io) { delete io; }

int64_t fs_io_submit(FileIo *io, int32_t is_write, int32_t descriptor, void *memory, int64_t nbytes, int64_t offset) {
    return io->submit({nullptr, is_write != 0, descriptor, static_cast<char *>(memory), nbytes, offset});
}

int32_t fs_io_wait(FileIo *io, int64_t ticket) { return io->wait(ticket); }

// File transfers through io_uring, by its three system calls: one thread keeps up to `depth` blocks with the kernel.
#include <cerrno>
#include <cstring>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

#include "file_io.h"

#if __has_include(<linux/io_uring.h>) && defined(__NR_io_uring_setup)
#include <linux/io_uring.h>

namespace {

// The memory that kernel and process share: a ring of submissions, one of completions.
class Ring {
  public:
    explicit Ring(uint32_t depth) {
        io_uring_params params = {};
        descriptor = int(syscall(__NR_io_uring_setup, depth, &params));
        if (descriptor < 0) throw int32_t(errno);
        // Kernels before 5.4 need two mappings; there the other engine serves.
        if (!(params.features & IORING_FEAT_SINGLE_MMAP)) fail(ENOSYS);
        const size_t submissions = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
        const size_t completions = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
        rings_bytes = submissions > completions ? submissions : completions;
        entries_bytes = params.sq_entries * sizeof(io_uring_sqe);
        rings = map(rings_bytes, IORING_OFF_SQ_RING);
        entries = reinterpret_cast<io_uring_sqe *>(map(entries_bytes, IORING_OFF_SQES));
        tail = at<uint32_t>(params.sq_off.tail);
        mask = *at<uint32_t>(params.sq_off.ring_mask);
        order = at<uint32_t>(params.sq_off.array);
        done_head = at<uint32_t>(params.cq_off.head);
        done_tail = at<uint32_t>(params.cq_off.tail);
        done_mask = *at<uint32_t>(params.cq_off.ring_mask);
        done = at<io_uring_cqe>(params.cq_off.cqes);
    }

    Ring(const Ring &) = delete;

    ~Ring() { release(); }

    // Puts a block into the ring; `tag` comes back with its result.
    void push(const Block &block, uint64_t tag) {
        const uint32_t index = *tail & mask;
        io_uring_sqe &entry = entries[index];
        std::memset(&entry, 0, sizeof entry);
        entry.opcode = block.is_write ? IORING_OP_WRITE : IORING_OP_READ;
        entry.fd = block.descriptor;
        entry.addr = reinterpret_cast<uint64_t>(block.memory);
        entry.len = uint32_t(block.nbytes);
        entry.off = uint64_t(block.offset);
        entry.user_data = tag;
        order[index] = index;
        __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
        num_pushed++;
    }

    // Hands over what was pushed and waits for at least one result.
    void enter() {
        const long taken = syscall(__NR_io_uring_enter, descriptor, num_pushed, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
        if (taken > 0) num_pushed -= uint32_t(taken);  // on EINTR or EAGAIN the next call hands them over
    }

    // The next result, if there is one: bytes moved, or a negative errno.
    bool pop(uint64_t &tag, int32_t &result) {
        const uint32_t head = *done_head;
        if (head == __atomic_load_n(done_tail, __ATOMIC_ACQUIRE)) return false;
        tag = done[head & done_mask].user_data;
        result = done[head & done_mask].res;
        __atomic_store_n(done_head, head + 1, __ATOMIC_RELEASE);
        return true;
    }

  private:
    char *map(size_t nbytes, off_t what) {
        void *made = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, what);
        if (made == MAP_FAILED) fail(errno);
        return static_cast<char *>(made);
    }

    [[noreturn]] void fail(int32_t error) {
        release();
        throw error;
    }

    void release() {
        if (entries) munmap(entries, entries_bytes);
        if (rings) munmap(rings, rings_bytes);
        close(descriptor);
    }

    template <class T> T *at(uint32_t offset) { return reinterpret_cast<T *>(rings + offset); }

    int descriptor;
    char *rings = nullptr;
    io_uring_sqe *entries = nullptr;
    size_t rings_bytes = 0, entries_bytes = 0;
    uint32_t *tail, *order, *done_head, *done_tail, mask, done_mask, num_pushed = 0;
    io_uring_cqe *done;
};

class RingIo final : public FileIo {
  public:
    RingIo(int32_t depth, int64_t block_bytes) : FileIo(block_bytes), ring(uint32_t(depth)), under_way(size_t(depth)) {
        for (int32_t i = 0; i < depth; i++) free_places.push_back(size_t(i));
        thread = std::thread([this] { work(); });
    }

    ~RingIo() override {
        stop();
        thread.join();
    }

  private:
    void work() {
        std::unique_lock lock(mutex);
        while (true) {
            if (free_places.size() == under_way.size()) {
                has_work.wait(lock, [this] { return is_stopping || !blocks.empty(); });
                if (blocks.empty()) return;
            }
            while (!blocks.empty() && !free_places.empty()) {
                const size_t place = free_places.back();
                free_places.pop_back();
                under_way[place] = blocks.front();
                blocks.pop_front();
                ring.push(under_way[place], place);
            }
            lock.unlock();
            ring.enter();
            lock.lock();
            uint64_t place;
            int32_t result;
            while (ring.pop(place, result)) {
                take(under_way[place], result);
                free_places.push_back(place);
            }
        }
    }

    void take(const Block &block, int32_t result) {
        if (result > 0 && result < block.nbytes)
            blocks.push_front(block.rest(result));
        else if (result == -EINTR || result == -EAGAIN)
            blocks.push_front(block);
        else if (result == 0)
            finish(block, block.is_write ? ENOSPC : FILE_ENDED);
        else
            finish(block, result < 0 ? -result : 0);
    }

    Ring ring;
    std::vector<Block> under_way;
    std::vector<size_t> free_places;
    std::thread thread;
};

}  // namespace

std::unique_ptr<FileIo> make_ring(int32_t depth, int64_t block_bytes) {
    return std::make_unique<RingIo>(depth, block_bytes);
}

#else

std::unique_ptr<FileIo> make_ring(int32_t, int64_t) { throw int32_t(ENOSYS); }

#endif

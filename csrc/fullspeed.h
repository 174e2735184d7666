// The C interface of FullSpeed's native library: raw pointers and plain numbers, called through ctypes.
//
// src/fullspeed/kernels/native.py declares the same; ABI_VERSION in both changes whenever anything here does.
#pragma once

#include <cstdint>

#define FS_API extern "C" __attribute__((visibility("default")))

constexpr int32_t ABI_VERSION = 4;

// Element types of a tensor; `none` stands for a tensor that is absent.
enum Dtype : int32_t { none = 0, float32 = 1, bfloat16 = 2, float16 = 3 };

enum Rule : int32_t { adam = 0, adagrad = 1, lion = 2 };

// One tensor to update. Its arrays have `numel` elements each and do not overlap.
struct Tensor {
    void *param;
    const void *grad;
    void *first;   // adam, lion: exp_avg; adagrad: sum
    void *second;  // adam: exp_avg_sq; else null
    void *copy;    // also gets the new values; null without
    int64_t numel;
    float step_size;        // adam: lr / (1 - beta1^t); adagrad: decayed lr; lion: lr
    float root_correction;  // adam: sqrt(1 - beta2^t)
};

// How all tensors of one call are updated. At most one of `penalty` (on the gradient) and `shrink` does something.
struct Update {
    Rule rule;
    Dtype param, grad, state, copy;
    float beta1, beta2;
    float rest1, rest2;  // 1 - beta, rounded once from double precision
    float eps;
    float penalty;  // weight_decay of L2 regularisation, or 0
    float shrink;   // 1 - lr * weight_decay of decoupled decay, or 1
};

FS_API int32_t fs_abi_version();

// Instruction sets that were compiled and that this processor has, best last: "avx2", "avx512"; "baseline" where the
// processor is no x86. There may be none.
FS_API int32_t fs_num_instruction_sets();
FS_API const char *fs_instruction_set(int32_t index);

// Updates tensors in one pass with up to `num_threads` threads. Returns 0, or -1 for dtypes it has no code for.
FS_API int32_t fs_update(const Update *how, const Tensor *tensors, int64_t count, int32_t num_threads, int32_t set);

// How a row of values is quantised: `block` values, an even number, share a scale.
struct Blocks {
    Dtype values;
    int32_t bits;  // 8 or 4
    int64_t block, numel;
};

// The parts of one quantised row.
struct Message {
    const uint8_t *codes;
    const float *scales;
};

// Both with up to `num_threads` threads. Return 0, or -1 for dtypes they have no code for.
FS_API int32_t fs_quantize(const Blocks *form, const void *values, uint8_t *codes, float *scales, int32_t num_threads,
                           int32_t set);
FS_API int32_t fs_dequantize_sum(const Blocks *form, const Message *messages, int64_t count, void *out,
                                 int32_t num_threads, int32_t set);

// Copies bytes that will not be read soon; the two ranges do not overlap.
FS_API void fs_copy_past_caches(void *to, const void *from, int64_t nbytes);

// Moves bytes between memory and open files, in the background: transfers are cut into blocks, of which `depth` are
// under way at once. Linux only.
struct FileIo;

enum Engine : int32_t { threads = 0, io_uring = 1 };

// Null with `*error` set to an errno where the engine cannot be had.
FS_API FileIo *fs_io_create(Engine engine, int32_t depth, int64_t block_bytes, int32_t *error);

// Waits for what is under way, then frees everything.
FS_API void fs_io_destroy(FileIo *io);

// Starts a transfer and returns its ticket. Memory and descriptor must live until it has been waited for.
FS_API int64_t fs_io_submit(FileIo *io, int32_t is_write, int32_t descriptor, void *memory, int64_t nbytes,
                            int64_t offset);

// Waits for a transfer, once. Returns 0, an errno, or FILE_ENDED if a read met the end of the file.
FS_API int32_t fs_io_wait(FileIo *io, int64_t ticket);

constexpr int32_t FILE_ENDED = -1;

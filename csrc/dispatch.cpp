// Chooses the instruction set and shares the work among threads.
#include <algorithm>
#include <vector>

#include "quantize.h"
#include "update.h"

namespace {

struct InstructionSet {
    const char *name;
    RangeFunction (*find)(const Update &how);
    QuantizeBlocks (*find_quantize)(const Blocks &form);
    SumBlocks (*find_sum)(const Blocks &form);
};

#define FS_SET(name) \
    { #name, name::find_range_function, name::find_quantize_function, name::find_sum_function }

std::vector<InstructionSet> available() {
    std::vector<InstructionSet> sets;
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        sets.push_back(FS_SET(avx2));
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512vl"))
            sets.push_back(FS_SET(avx512));
    }
#else
    sets.push_back(FS_SET(baseline));
#endif
    return sets;
}

const std::vector<InstructionSet> &sets() {
    static const std::vector<InstructionSet> found = available();
    return found;
}

struct Chunk {
    const Tensor *tensor;
    int64_t begin, end;
};

// Small enough that a thread that loses its core delays the others little, large enough that starting one costs nothing.
constexpr int64_t CHUNK_NUMEL = 1 << 16;

std::vector<Chunk> cut(const Tensor *tensors, int64_t count) {
    std::vector<Chunk> chunks;
    for (const Tensor *tensor = tensors; tensor != tensors + count; tensor++)
        for (int64_t begin = 0; begin < tensor->numel; begin += CHUNK_NUMEL)
            chunks.push_back({tensor, begin, std::min(begin + CHUNK_NUMEL, tensor->numel)});
    return chunks;
}

// Calls `work(begin, end)` for stretches of blocks.
template <class Work> void for_blocks(const Blocks &form, int32_t num_threads, const Work &work) {
    const int64_t num_blocks = (form.numel + form.block - 1) / form.block;
    const int64_t stretch = std::max<int64_t>(1, CHUNK_NUMEL / form.block);
    const int64_t num_stretches = (num_blocks + stretch - 1) / stretch;
    const int team = num_stretches <= 1 ? 1 : std::max(1, num_threads);
    (void)team;
#pragma omp parallel for schedule(dynamic) num_threads(team) if (team > 1)
    for (int64_t i = 0; i < num_stretches; i++) work(i * stretch, std::min((i + 1) * stretch, num_blocks));
}

}  // namespace

int32_t fs_abi_version() { return ABI_VERSION; }

int32_t fs_num_instruction_sets() { return int32_t(sets().size()); }

const char *fs_instruction_set(int32_t index) { return sets()[size_t(index)].name; }

int32_t fs_update(const Update *how, const Tensor *tensors, int64_t count, int32_t num_threads, int32_t set) {
    const RangeFunction update = sets()[size_t(set)].find(*how);
    if (!update) return -1;
    const std::vector<Chunk> chunks = cut(tensors, count);
    const int64_t num_chunks = int64_t(chunks.size());
    int64_t numel = 0;
    for (const Chunk &chunk : chunks) numel += chunk.end - chunk.begin;
    const int team = numel <= CHUNK_NUMEL ? 1 : std::max(1, num_threads);
    (void)team;
#pragma omp parallel for schedule(dynamic) num_threads(team) if (team > 1)
    for (int64_t i = 0; i < num_chunks; i++) update(*how, *chunks[size_t(i)].tensor, chunks[size_t(i)].begin, chunks[size_t(i)].end);
    return 0;
}

int32_t fs_quantize(const Blocks *form, const void *values, uint8_t *codes, float *scales, int32_t num_threads,
                    int32_t set) {
    const QuantizeBlocks quantize = sets()[size_t(set)].find_quantize(*form);
    if (!quantize) return -1;
    for_blocks(*form, num_threads,
               [&](int64_t begin, int64_t end) { quantize(*form, values, codes, scales, begin, end); });
    return 0;
}

int32_t fs_dequantize_sum(const Blocks *form, const Message *messages, int64_t count, void *out, int32_t num_threads,
                          int32_t set) {
    const SumBlocks sum = sets()[size_t(set)].find_sum(*form);
    if (!sum) return -1;
    for_blocks(*form, num_threads, [&](int64_t begin, int64_t end) { sum(*form, messages, count, out, begin, end); });
    return 0;
}

// Chooses the instruction set and shares the work among threads.
#include <algorithm>
#include <vector>

#include "update.h"

namespace {

using Find = RangeFunction (*)(const Update &how);

struct InstructionSet {
    const char *name;
    Find find;
};

std::vector<InstructionSet> available() {
    std::vector<InstructionSet> sets;
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        sets.push_back({"avx2", avx2::find_range_function});
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512vl"))
            sets.push_back({"avx512", avx512::find_range_function});
    }
#else
    sets.push_back({"baseline", baseline::find_range_function});
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

// A copy past the caches: of what will not be read soon, such as the staged copy of a checkpoint.
//
// An ordinary store first loads the line it overwrites; a streaming one does not, which is a third of the traffic.
#include "fullspeed.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>

namespace {

constexpr int64_t LINE_BYTES = 64;
constexpr int64_t AHEAD_BYTES = 1024;  // of reading: some ten lines hide the latency of memory

void stream_line(char *to, const char *from) {
    const auto *source = reinterpret_cast<const __m128i *>(from);
    auto *target = reinterpret_cast<__m128i *>(to);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
}

}  // namespace

void fs_copy_past_caches(void *to, const void *from, int64_t nbytes) {
    auto *target = static_cast<char *>(to);
    const auto *source = static_cast<const char *>(from);
    const auto past_line = static_cast<int64_t>(reinterpret_cast<uintptr_t>(target) % LINE_BYTES);
    int64_t done = past_line == 0 ? 0 : LINE_BYTES - past_line;
    if (nbytes < done) done = nbytes;
    std::memcpy(target, source, done);
    for (; done + LINE_BYTES <= nbytes; done += LINE_BYTES) {
        _mm_prefetch(source + done + AHEAD_BYTES, _MM_HINT_NTA);
        stream_line(target + done, source + done);
    }
    std::memcpy(target + done, source + done, nbytes - done);
    _mm_sfence();  // whoever is told that the copy is complete finds it so
}

#else

void fs_copy_past_caches(void *to, const void *from, int64_t nbytes) { std::memcpy(to, from, nbytes); }

#endif

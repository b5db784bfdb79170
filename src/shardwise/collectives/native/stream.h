// Copies of large outputs that go past the caches.
//
// An ordinary store fetches the line that it is about to overwrite, and pushes out of the caches what the ranks exchange
// there: of an output that no cache can hold until it is read, that is half of the memory traffic.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace shardwise {

constexpr uint64_t kPastCaches = 48 << 20;  // outputs of a host's ranks together from which on this is quicker, reading included

inline void copy(void* to, const void* from, uint64_t bytes) {
  if (to != from && bytes != 0) std::memcpy(to, from, bytes);
}

// As `copy`; other threads see the bytes after whatever this thread stores next. Plain where there are no such stores.
inline void stream(void* to, const void* from, uint64_t bytes) {
#if defined(__SSE2__)
  if (to == from) return;
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  const uint64_t head = std::min<uint64_t>(bytes, (64 - reinterpret_cast<uintptr_t>(target) % 64) % 64);
  copy(target, source, head);
  uint64_t done = head;
  for (; done + 64 <= bytes; done += 64) {  // a whole line at a time: a part of one would be fetched first
    __m128i words[4];
    for (int i = 0; i < 4; ++i) words[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + done) + i);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(target + done) + i, words[i]);
  }
  copy(target + done, source + done, bytes - done);
  _mm_sfence();  // no later store orders these
#else
  copy(to, from, bytes);
#endif
}

using Copy = void (*)(void*, const void*, uint64_t);

// How the ranks of a host write their outputs, of `bytes` together.
inline Copy copier(uint64_t bytes) { return bytes < kPastCaches ? copy : stream; }

}  // namespace shardwise

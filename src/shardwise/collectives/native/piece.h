// What one rank sends another one, or has from it, in an all-to-all: bytes one after the other, or rows anywhere in a tensor.
//
// Rows are copied from where they lie straight to where they are staged, and from there to their place: a copy that has
// them one after the other would be written and read once more.
#pragma once

#include <algorithm>
#include <cstdint>

#include "stream.h"

namespace shardwise {

struct Piece {
  void* data;
  uint64_t bytes;
  const int64_t* rows = nullptr;  // the places of its rows in `data`; none: the bytes lie one after the other
  uint64_t row = 0;               // bytes of each of them

  // Calls `visit(memory, length)` for each run of neighbouring bytes in bytes `offset` to `offset + length` of the piece.
  template <class Visit>
  void runs(uint64_t offset, uint64_t length, Visit visit) const {
    char* const first = static_cast<char*>(data);
    if (rows == nullptr) return visit(first + offset, length);
    for (const uint64_t end = offset + length; offset < end;) {
      const uint64_t index = offset / row, from = offset % row;
      uint64_t count = 1;
      while ((index + count) * row < end && rows[index + count] == rows[index] + static_cast<int64_t>(count)) ++count;
      const uint64_t run = std::min(count * row - from, end - offset);
      visit(first + static_cast<uint64_t>(rows[index]) * row + from, run);
      offset += run;
    }
  }
};

// Bytes `offset` to `offset + length` of a piece, to memory where they lie one after the other.
inline void copy_out(char* to, const Piece& from, uint64_t offset, uint64_t length) {
  from.runs(offset, length, [&](const char* memory, uint64_t run) {
    copy(to, memory, run);
    to += run;
  });
}

// The way back: `put` writes them.
inline void copy_in(Copy put, const Piece& to, uint64_t offset, const char* from, uint64_t length) {
  to.runs(offset, length, [&](char* memory, uint64_t run) {
    put(memory, from, run);
    from += run;
  });
}

inline void copy_across(Copy put, const Piece& to, const Piece& from, uint64_t offset, uint64_t length) {
  from.runs(offset, length, [&](const char* memory, uint64_t run) {
    copy_in(put, to, offset, memory, run);
    offset += run;
  });
}

}  // namespace shardwise

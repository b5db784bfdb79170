// The collectives themselves, as rounds. M is the bytes of the full buffer, n the ranks; docs/explanations/collectives.md has the costs.
#include "group.h"

namespace shardwise {
namespace {

// Up to this many bytes of all inputs together, every rank adding everything is quicker than a second barrier.
constexpr uint64_t kAtOnce = 64 << 10;
// What of a sum is in the first-level cache between being made and being written past the caches.
constexpr uint64_t kPiece = 16 << 10;

}  // namespace

void Group::sum(void* out, const std::vector<const void*>& inputs, uint64_t elements, Number to) const {
  std::vector<double> factors(inputs.size(), 1.0);
  if (call_.reduce == Reduce::scaled_sum) {
    for (int peer = 0; peer < room_.size; ++peer) factors[peer] = room_.member(peer).calls[call_.sequence % 2].factor;
  }
  shardwise::reduce({call_.number, to}, call_.reduce, out, inputs, factors, elements, inputs.size());
}

void Group::sum_and_put(Copy put, void* out, const std::vector<const void*>& inputs, uint64_t elements) const {
  if (put == copy) return sum(out, inputs, elements, call_.number);
  alignas(64) char piece[kPiece];
  const uint64_t item = call_.item, step = kPiece / item;
  std::vector<const void*> parts(inputs.size());
  for (uint64_t done = 0; done < elements; done += step) {
    const uint64_t count = std::min(step, elements - done);
    for (size_t i = 0; i < parts.size(); ++i) parts[i] = at(inputs[i], done * item);
    sum(piece, parts, count, call_.number);
    put(at(out, done * item), piece, count * item);
  }
}

void Group::all_gather(Call call, const void* input, const std::vector<void*>& outputs, int64_t timeout) {
  begin(call, timeout);
  all_gather_here(input, outputs);
}

void Group::all_gather_here(const void* input, const std::vector<void*>& outputs) {
  const uint64_t bytes = call_.count * call_.item;
  const Copy put = copier(bytes * room_.size * room_.size);
  const auto stage = [&](uint64_t offset, uint64_t length) { copy(mine(), at(input, offset), length); };
  const auto take = [&](uint64_t offset, uint64_t length) {
    for (int peer = 0; peer < room_.size; ++peer) {
      const char* from = peer == room_.rank ? at(input, offset) : theirs(peer);
      put(at(outputs[peer], offset), from, length);
    }
  };
  rounds(bytes, room_.slot / 2, stage, take);  // copies alone gain nothing from longer rounds (measured)
}

// A rank's area holds a part for each of the others. Everyone adds what is meant for it, in the order of the ranks.
void Group::reduce_scatter(Call call, const std::vector<const void*>& inputs, void* output, int64_t timeout) {
  begin(call, timeout);
  const Hold seat = take_seat();
  const uint64_t bytes = call.count * call.item, step = aligned(room_.slot / room_.size);
  if (chains(bytes * room_.size)) return reduce_scatter_in_chain(inputs, output);
  // An output that is an input is in the caches still.
  const Copy put = output == inputs[room_.rank] ? copy : copier(bytes * room_.size);
  const auto stage = [&](uint64_t offset, uint64_t length) {
    for (int peer = 0; peer < room_.size; ++peer) {
      if (peer != room_.rank) copy(mine() + peer * step, at(inputs[peer], offset), length);
    }
  };
  std::vector<const void*> parts(room_.size);
  const auto take = [&](uint64_t offset, uint64_t length) {
    for (int peer = 0; peer < room_.size; ++peer) parts[peer] = theirs(peer) + room_.rank * step;
    parts[room_.rank] = at(inputs[room_.rank], offset);
    sum_and_put(put, at(output, offset), parts, length / call.item);
  };
  rounds(bytes, step, stage, take);
}

void Group::all_reduce(Call call, const void* input, void* output, int64_t timeout) {
  begin(call, timeout);
  const Hold seat = take_seat();
  const uint64_t bytes = call.count * call.item;
  const char* from = static_cast<const char*>(input);
  char* to = static_cast<char*>(output);
  if (bytes * room_.size <= kAtOnce) return all_reduce_at_once(from, to, bytes);
  chains(bytes) ? all_reduce_in_chain(from, to, bytes) : all_reduce_in_parts(from, to, bytes);
}

void Group::all_reduce_at_once(const char* input, char* output, uint64_t bytes) {
  std::vector<const void*> parts(room_.size);
  const auto stage = [&](uint64_t offset, uint64_t length) { copy(mine(), input + offset, length); };
  const auto take = [&](uint64_t offset, uint64_t length) {
    for (int peer = 0; peer < room_.size; ++peer) parts[peer] = theirs(peer);
    sum(output + offset, parts, length / call_.item, call_.number);
  };
  rounds(bytes, room_.slot, stage, take);
}

// Chunk by chunk, in three stages that follow each other at one barrier's distance: everyone stages the parts of the chunk
// that others add; everyone adds its own part, into its output and the common result; everyone copies the other parts.
// Each round does all three, for three chunks.
void Group::all_reduce_in_parts(const char* input, char* output, uint64_t bytes) {
  const uint64_t part = aligned(room_.slot / room_.size), step = part * room_.size, own = part * room_.rank;
  const uint64_t chunks = (bytes + step - 1) / step;
  const auto length_of = [&](uint64_t chunk) { return std::min(step, bytes - chunk * step); };
  // The input's lines, which the output is written to, are still in the caches of two ranks, not of more.
  const Copy put = room_.size <= 2 ? copy : copier(bytes * room_.size);
  // All of the chunk but this rank's part of it.
  const auto copy_others = [&](Copy by, char* to, const char* from, uint64_t length) {
    by(to, from, std::min(own, length));
    if (own + part < length) by(to + own + part, from + own + part, length - own - part);
  };
  std::vector<const void*> parts(room_.size);
  for (uint64_t round = 0; round < chunks + 2; ++round) {
    if (round < chunks) copy_others(copy, mine(), input + round * step, length_of(round));
    if (round >= 1 && round <= chunks && own < length_of(round - 1)) {
      const uint64_t at = (round - 1) * step + own, length = std::min(part, length_of(round - 1) - own);
      for (int peer = 0; peer < room_.size; ++peer) parts[peer] = theirs(peer) + own;
      parts[room_.rank] = input + at;
      sum(output + at, parts, length / call_.item, call_.number);
      copy(room_.result((round_ + 1) % 2) + own, output + at, length);
    }
    if (round >= 2) copy_others(put, output + (round - 2) * step, room_.result(round_ % 2), length_of(round - 2));
    if (round <= chunks) meet();
    if (round == 0) compare();
  }
}

void Group::broadcast(Call call, void* data, int64_t timeout) {
  begin(call, timeout);
  const bool root = room_.rank == call.root;
  const uint64_t bytes = call.count * call.item;
  const Copy put = copier(bytes * (room_.size - 1));
  const auto stage = [&](uint64_t offset, uint64_t length) {
    if (root) copy(mine(), at(data, offset), length);
  };
  const auto take = [&](uint64_t offset, uint64_t length) {
    if (!root) put(at(data, offset), theirs(call.root), length);
  };
  rounds(bytes, room_.slot, stage, take);
}

void Group::gather(Call call, const void* input, const std::vector<void*>& outputs, int64_t timeout) {
  begin(call, timeout);
  gather_here(call.root, input, outputs);
}

void Group::gather_here(int to, const void* input, const std::vector<void*>& outputs) {
  const bool root = room_.rank == to;
  const Copy put = copier(call_.count * call_.item * room_.size);
  const auto stage = [&](uint64_t offset, uint64_t length) {
    if (!root) copy(mine(), at(input, offset), length);
  };
  const auto take = [&](uint64_t offset, uint64_t length) {
    for (int peer = 0; root && peer < room_.size; ++peer) {
      put(at(outputs[peer], offset), peer == room_.rank ? at(input, offset) : theirs(peer), length);
    }
  };
  rounds(call_.count * call_.item, room_.slot, stage, take);
}

void Group::scatter(Call call, const std::vector<const void*>& inputs, void* output, int64_t timeout) {
  begin(call, timeout);
  scatter_here(call.root, inputs, output);
}

void Group::scatter_here(int source, const std::vector<const void*>& inputs, void* output) {
  const bool root = room_.rank == source;
  const uint64_t step = aligned(room_.slot / room_.size);
  const Copy put = copier(call_.count * call_.item * room_.size);
  const auto stage = [&](uint64_t offset, uint64_t length) {
    for (int peer = 0; root && peer < room_.size; ++peer) {
      if (peer != room_.rank) copy(mine() + peer * step, at(inputs[peer], offset), length);
    }
  };
  const auto take = [&](uint64_t offset, uint64_t length) {
    put(at(output, offset), root ? at(inputs[room_.rank], offset) : theirs(source) + room_.rank * step, length);
  };
  rounds(call_.count * call_.item, step, stage, take);
}

void Group::reduce(Call call, const void* input, void* output, int64_t timeout) {
  begin(call, timeout);
  const bool root = room_.rank == call.root;
  std::vector<const void*> parts(room_.size);
  const auto stage = [&](uint64_t offset, uint64_t length) {
    if (!root) copy(mine(), at(input, offset), length);
  };
  const auto take = [&](uint64_t offset, uint64_t length) {
    for (int peer = 0; peer < room_.size; ++peer) parts[peer] = theirs(peer);
    parts[room_.rank] = at(input, offset);
    if (root) sum(at(output, offset), parts, length / call.item, call.number);
  };
  rounds(call.count * call.item, room_.slot, stage, take);
}

void Group::all_to_all(Call call, const std::vector<Piece>& inputs, const std::vector<Piece>& outputs, int64_t timeout) {
  begin(call, timeout);
  all_to_all_here(inputs, outputs);
}

// How many rounds there are is known only when all sizes are, so the first round is made before that.
void Group::all_to_all_here(const std::vector<Piece>& inputs, const std::vector<Piece>& outputs) {
  const uint64_t step = aligned(room_.slot / room_.size);
  uint64_t* sizes = room_.sizes(room_.rank, call_.sequence % 2);
  uint64_t received = 0;
  for (int peer = 0; peer < room_.size; ++peer) {
    sizes[peer] = inputs[peer].bytes;
    received += sizes[room_.size + peer] = outputs[peer].bytes;
  }
  const Copy put = copier(received * room_.size);
  uint64_t most = 1;
  const auto part = [&](uint64_t bytes, uint64_t offset) { return bytes > offset ? std::min(step, bytes - offset) : 0; };
  for (uint64_t offset = 0; offset < most; offset += step) {
    for (int peer = 0; peer < room_.size; ++peer) {
      const uint64_t length = part(inputs[peer].bytes, offset);
      if (peer != room_.rank && length) copy_out(mine() + peer * step, inputs[peer], offset, length);
    }
    meet();
    if (offset == 0) {
      compare();
      compare_sizes(most);
    }
    for (int peer = 0; peer < room_.size; ++peer) {
      const uint64_t length = part(outputs[peer].bytes, offset);
      if (length == 0) continue;
      if (peer == room_.rank) {
        copy_across(put, outputs[peer], inputs[peer], offset, length);
      } else {
        copy_in(put, outputs[peer], offset, theirs(peer) + room_.rank * step, length);
      }
    }
  }
}

void Group::barrier(Call call, int64_t timeout) {
  begin(call, timeout);
  meet();
  compare();
}

}  // namespace shardwise

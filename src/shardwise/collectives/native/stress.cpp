// A stress of the engine without torch, for the sanitizers: ranks as threads over one shared memory, random operations
// with checked results, messages beside them, and a group that breaks. Built by tests/collectives/test_engine_native.py.
//
//   stress RANKS ROUNDS SEED
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>

#include "group.h"
#include "messages.h"

using namespace shardwise;

namespace {

constexpr int64_t kPatience = 60 * kNanoseconds;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::abort();
}

// What a rank contributes at an index: whole numbers, so that every sum is exact.
float value(int round, int rank, uint64_t index) { return static_cast<float>((round + 3 * rank + index) % 17); }

std::vector<float> input(int round, int rank, uint64_t count) {
  std::vector<float> made(count);
  for (uint64_t i = 0; i < count; ++i) made[i] = value(round, rank, i);
  return made;
}

float total(int round, int ranks, uint64_t index) {
  float sum = 0;
  for (int rank = 0; rank < ranks; ++rank) sum += value(round, rank, index);
  return sum;
}

Call call_of(Kind kind, uint64_t count, int root = -1, Reduce reduce = Reduce::none) {
  return {0, kind, reduce, 0, Number::f32, root, 4, count, 1.0};
}

void all_gather(Group& group, int round, int rank, int ranks, uint64_t count) {
  const std::vector<float> mine = input(round, rank, count);
  std::vector<float> all(count * ranks);
  std::vector<void*> outputs;
  for (int peer = 0; peer < ranks; ++peer) outputs.push_back(all.data() + peer * count);
  group.all_gather(call_of(Kind::all_gather, count), mine.data(), outputs, kPatience);
  for (uint64_t i = 0; i < all.size(); ++i) require(all[i] == value(round, i / count, i % count), "all_gather");
}

void reduce_scatter(Group& group, int round, int rank, int ranks, uint64_t count) {
  const std::vector<float> mine = input(round, rank, count * ranks);
  std::vector<float> sum(count);
  std::vector<const void*> inputs;
  for (int peer = 0; peer < ranks; ++peer) inputs.push_back(mine.data() + peer * count);
  group.reduce_scatter(call_of(Kind::reduce_scatter, count, -1, Reduce::sum), inputs, sum.data(), kPatience);
  for (uint64_t i = 0; i < count; ++i) require(sum[i] == total(round, ranks, rank * count + i), "reduce_scatter");
}

void all_reduce(Group& group, int round, int rank, int ranks, uint64_t count) {
  std::vector<float> data = input(round, rank, count);
  group.all_reduce(call_of(Kind::all_reduce, count, -1, Reduce::sum), data.data(), data.data(), kPatience);
  for (uint64_t i = 0; i < count; ++i) require(data[i] == total(round, ranks, i), "all_reduce");
}

void broadcast(Group& group, int round, int rank, int ranks, uint64_t count) {
  const int root = round % ranks;
  std::vector<float> data = input(round, rank, count);
  group.broadcast(call_of(Kind::broadcast, count, root), data.data(), kPatience);
  for (uint64_t i = 0; i < count; ++i) require(data[i] == value(round, root, i), "broadcast");
}

void all_to_all(Group& group, int round, int rank, int ranks, uint64_t count) {
  std::vector<float> mine = input(round, rank, count * ranks), all(count * ranks);
  std::vector<Piece> from, to;
  for (int peer = 0; peer < ranks; ++peer) {
    from.push_back({mine.data() + peer * count, count * 4});
    to.push_back({all.data() + peer * count, count * 4});
  }
  group.all_to_all(call_of(Kind::all_to_all, 0), from, to, kPatience);
  for (uint64_t i = 0; i < all.size(); ++i) {
    require(all[i] == value(round, i / count, rank * count + i % count), "all_to_all");
  }
}

// Every rank sends to the next one and receives from the one before.
void pass_on(Messenger& messenger, int round, int rank, int ranks, uint64_t count) {
  const std::vector<float> mine = input(round, rank, count);
  std::vector<float> other(count);
  std::atomic<int> open{2};
  const auto done = [&](std::exception_ptr error, int) {
    require(!error, "message");
    open.fetch_sub(1, std::memory_order_release);
  };
  const int before = (rank + ranks - 1) % ranks;
  messenger.send((rank + 1) % ranks, round, 0, mine.data(), count * 4, kPatience, done);
  messenger.receive(before, round, 0, other.data(), count * 4, kPatience, done);
  while (open.load(std::memory_order_acquire) != 0) sched_yield();
  for (uint64_t i = 0; i < count; ++i) require(other[i] == value(round, before, i), "message");
}

void run(Room& room, int rounds, unsigned seed) {
  const int rank = room.rank, ranks = room.size;
  Group group(room);
  Messenger messenger(room);
  std::mt19937 random(seed);  // the same on all ranks
  const uint64_t counts[] = {0, 1, 100, 5000, 40000, 200000};
  for (int round = 0; round < rounds; ++round) {
    const uint64_t count = counts[random() % 6];
    switch (random() % 6) {
      case 0: all_gather(group, round, rank, ranks, count); break;
      case 1: reduce_scatter(group, round, rank, ranks, count); break;
      case 2: all_reduce(group, round, rank, ranks, count); break;
      case 3: broadcast(group, round, rank, ranks, count); break;
      case 4: all_to_all(group, round, rank, ranks, count); break;
      default: if (ranks > 1) pass_on(messenger, round, rank, ranks, count);
    }
  }
  // At the end the ranks disagree, and all have to hear of it.
  bool told = false;
  try {
    if (rank == 0) group.barrier(call_of(Kind::barrier, 0), kPatience);
    if (rank != 0) all_reduce(group, 0, rank, ranks, 10);
  } catch (const Failure&) {
    told = true;
  }
  require(told || ranks == 1, "different calls went unnoticed");
}

}  // namespace

int main(int count, char** words) {
  require(count == 4, "usage: stress RANKS ROUNDS SEED");
  const int ranks = std::atoi(words[1]), rounds = std::atoi(words[2]);
  const uint64_t token[2] = {11, 22};
  std::vector<int> names;
  for (int rank = 0; rank < ranks; ++rank) names.push_back(rank);
  Room first(Room::create(ranks, token), 0, ranks, token, names);
  std::vector<std::unique_ptr<Room>> rooms;
  for (int rank = 1; rank < ranks; ++rank) rooms.push_back(std::make_unique<Room>(first, rank));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] { run(rank ? *rooms[rank - 1] : first, rounds, static_cast<unsigned>(std::atoi(words[3]))); });
  }
  for (std::thread& thread : threads) thread.join();
  std::puts("ok");
}

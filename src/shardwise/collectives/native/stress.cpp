// A stress of the engine without torch, for the sanitizers: ranks as threads over one shared memory, or over several and
// connections between them, random operations with checked results, messages beside them, and a group that breaks. While
// hosts meet, a stranger calls at their gates. Ahead of it means of integers and the edges of connections; at the end tasks
// in turn with callbacks that wait for tasks.
// Built by tests/collectives/test_engine_build.py.
//
//   stress RANKS ROUNDS SEED [HOSTS]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <thread>

#include <sys/socket.h>

#include "gate.h"
#include "group.h"
#include "hosts.h"
#include "messages.h"
#include "monitored_barrier.h"
#include "stress_edges.h"
#include "thread_pool.h"
#include "turns.h"

using namespace shardwise;

namespace {

constexpr int64_t kPatience = 60 * kNanoseconds;
constexpr uint64_t kLarge = 1100003;  // sums go in a chain and outputs past the caches; no part but the first is aligned

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

// In bf16, by the upper half of each fp32: sums of whole numbers up to 256 are exact in it.
void all_reduce_short(Group& group, int round, int rank, int ranks, uint64_t count) {
  std::vector<uint16_t> data(count);
  const auto upper = [](float wide) {
    uint32_t bits;
    std::memcpy(&bits, &wide, sizeof bits);
    return static_cast<uint16_t>(bits >> 16);
  };
  for (uint64_t i = 0; i < count; ++i) data[i] = upper(value(round, rank, i));
  Call call = call_of(Kind::all_reduce, count, -1, Reduce::sum);
  call.number = Number::bf16;
  call.item = 2;
  group.all_reduce(call, data.data(), data.data(), kPatience);
  for (uint64_t i = 0; i < count; ++i) require(data[i] == upper(total(round, ranks, i)), "all_reduce in bf16");
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
  std::vector<int64_t> places(count);  // in every other round rows that are taken last first, and put back so
  for (uint64_t i = 0; i < count; ++i) places[i] = static_cast<int64_t>(count - 1 - i);
  const int64_t* const rows = round % 2 ? places.data() : nullptr;
  for (int peer = 0; peer < ranks; ++peer) {
    from.push_back({mine.data() + peer * count, count * 4, rows, 4});
    to.push_back({all.data() + peer * count, count * 4, rows, 4});
  }
  group.all_to_all(call_of(Kind::all_to_all, 0), from, to, kPatience);
  for (uint64_t i = 0; i < all.size(); ++i) {
    require(all[i] == value(round, i / count, rank * count + i % count), "all_to_all");
  }
}

void gather(Group& group, int round, int rank, int ranks, uint64_t count) {
  const int root = round % ranks;
  const std::vector<float> mine = input(round, rank, count);
  std::vector<float> all(count * ranks);
  std::vector<void*> outputs;
  for (int peer = 0; peer < ranks; ++peer) outputs.push_back(all.data() + peer * count);
  group.gather(call_of(Kind::gather, count, root), mine.data(), rank == root ? outputs : std::vector<void*>{}, kPatience);
  for (uint64_t i = 0; i < all.size() && rank == root; ++i) require(all[i] == value(round, i / count, i % count), "gather");
}

void scatter(Group& group, int round, int rank, int ranks, uint64_t count) {
  const int root = round % ranks;
  const std::vector<float> all = input(round, rank, count * ranks);
  std::vector<float> mine(count);
  std::vector<const void*> inputs;
  for (int peer = 0; peer < ranks; ++peer) inputs.push_back(all.data() + peer * count);
  group.scatter(call_of(Kind::scatter, count, root), rank == root ? inputs : std::vector<const void*>{}, mine.data(), kPatience);
  for (uint64_t i = 0; i < count; ++i) require(mine[i] == value(round, root, rank * count + i), "scatter");
}

void reduce(Group& group, int round, int rank, int ranks, uint64_t count) {
  const int root = round % ranks;
  const std::vector<float> data = input(round, rank, count);
  std::vector<float> sum(count);
  group.reduce(call_of(Kind::reduce, count, root, Reduce::sum), data.data(), sum.data(), kPatience);
  for (uint64_t i = 0; i < count && rank == root; ++i) require(sum[i] == total(round, ranks, i), "reduce");
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

void run(Group& group, Messenger& messenger, int rank, int ranks, int rounds, unsigned seed) {
  std::mt19937 random(seed);  // the same on all ranks
  const uint64_t counts[] = {0, 1, 100, 5000, 40000, 200000};
  std::vector<int> names(ranks);
  std::iota(names.begin(), names.end(), 0);
  for (int round = 0; round < rounds; ++round) {
    const bool large = round % 25 == 5;  // each of the sums in turn, and what is gathered
    const uint64_t some = counts[random() % 6], kind = random() % 12, count = large ? kLarge : some;
    switch (large ? round / 25 % 4 : kind) {
      case 0: all_gather(group, round, rank, ranks, count); break;
      case 1: reduce_scatter(group, round, rank, ranks, count); break;
      case 2: all_reduce(group, round, rank, ranks, large ? count * ranks : count); break;
      case 3: all_reduce_short(group, round, rank, ranks, large ? count * ranks : count); break;
      case 4: all_to_all(group, round, rank, ranks, count); break;
      case 5: gather(group, round, rank, ranks, count); break;
      case 6: scatter(group, round, rank, ranks, count); break;
      case 7: reduce(group, round, rank, ranks, count); break;
      case 8: group.barrier(call_of(Kind::barrier, 0), kPatience); break;
      case 9: MonitoredBarrier(messenger, names, kPatience).run(rank, round % 2 == 0); break;
      case 10: broadcast(group, round, rank, ranks, count); break;
      default: if (ranks > 1) pass_on(messenger, round, rank, ranks, count);
    }
  }
  // At the end the ranks disagree, and all have to hear of it; some while they are still in the barrier before.
  bool told = false;
  try {
    group.barrier(call_of(Kind::barrier, 0), kPatience);
    if (rank == 0) group.barrier(call_of(Kind::barrier, 0), kPatience);
    if (rank != 0) all_reduce(group, 0, rank, ranks, 10);
  } catch (const Failure& failure) {
    told = std::strstr(failure.what(), "different collectives") != nullptr;
  }
  require(told || ranks == 1, "different calls went unnoticed");
}

// One rank of the group: its part of its host's memory and its connections.
struct Rank {
  std::unique_ptr<Room> room;
  std::unique_ptr<Wire> wire;
  std::unique_ptr<Group> group;
  std::unique_ptr<Messenger> messenger;
};

void open_alone(Rank& rank) {
  rank.group = std::make_unique<Group>(*rank.room);
  rank.messenger = std::make_unique<Messenger>(Peers(*rank.room));
}

void open(Rank& rank, const Places& places, Gate& gate, const std::vector<std::unique_ptr<Gate>>& gates) {
  Gate::Party party{places.rank, {1, 2, 3}, {4, 5, 6}, {}, {}, {}};
  std::vector<int> names, in_room;
  for (int peer = 0; peer < places.size(); ++peer) {
    names.push_back(peer);
    in_room.push_back(places.is_remote(peer) ? -1 : places.local[peer]);
    party.addresses.push_back(places.is_remote(peer) ? gates[peer]->address() : "");
    party.ports.push_back(gates[peer]->port());
    party.who.push_back("rank " + std::to_string(peer));
  }
  rank.wire = std::make_unique<Wire>(*rank.room, gate.meet(party, kPatience), names, party.who);
  rank.group = std::make_unique<Hosts>(*rank.room, *rank.wire, places);
  rank.messenger = std::make_unique<Messenger>(Peers(*rank.room, *rank.wire, places.rank, in_room, names));
}

// Calls at a gate, talks nonsense and stays.
int stranger(const Gate& gate) {
  const int caller = silent_stranger(gate);
  const std::string nonsense(1000, 'x');
  require(send(caller, nonsense.data(), nonsense.size(), MSG_NOSIGNAL) > 0, "the stranger's words");
  return caller;
}

// Callbacks wait for what comes after them.
void wait_for_a_later_task(Turns& turns) {
  std::mutex mutex;
  std::condition_variable changed;
  bool later = false, over = false;
  const auto set = [&](bool& what) {
    std::lock_guard<std::mutex> lock(mutex);
    what = true;
    changed.notify_all();
  };
  const auto await = [&](bool& what) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return what; });
  };
  turns.run([&] { return Turns::Callbacks([&] { await(later), set(over); }); }, false);
  turns.run([&] { return set(later), Turns::Callbacks(); }, false);
  await(over);
}

// Several threads ask for turns. A task has callbacks, which wait for a task of their own, or leave one behind.
void take_turns(unsigned seed) {
  const auto turns = std::make_shared<Turns>();
  std::atomic<int> inside{0}, open{0};
  std::atomic<int> last{0};  // whose callbacks run
  const auto task = [&inside] {
    require(inside.fetch_add(1) == 0, "two tasks at once");
    inside.fetch_sub(1);
  };
  const auto callbacks = [&](int number, bool waits) {
    last.store(number);
    std::atomic<bool> done{false};
    open.fetch_add(1);
    const auto own = [&, number, waits] {
      task();
      require(last.load() == number, "a task came before what the callbacks of the one before have called");
      if (waits) done.store(true);
      open.fetch_sub(1);
      return Turns::Callbacks();
    };
    turns->run(own, number % 3 == 0);
    while (waits && !done.load()) sched_yield();
    open.fetch_sub(1);
  };
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      std::mt19937 random(seed + caller);
      for (int count = 0; count < 100; ++count) {
        open.fetch_add(1);
        const int number = caller * 100 + count;
        const auto run = [&, number, waits = random() % 2 == 0] {
          task();
          return Turns::Callbacks([&, number, waits] { callbacks(number, waits); });
        };
        turns->run(run, random() % 2 == 0);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  while (open.load() != 0) sched_yield();
  wait_for_a_later_task(*turns);
  turns->stop();
  ThreadPool::of_process().release();
  ThreadPool::of_process().end(now() + kPatience);
  ThreadPool::of_process().run([] { require(false, "a callback after the end"); });
}

}  // namespace

// Means over more ranks than an element of 8 bits can count.
template <class T>
void mean_of(Number number) {
  for (const size_t ranks : {100, 128, 200, 256, 300}) {
    const std::vector<T> mine(3, 0), last{3, 99, 100};
    std::vector<const void*> inputs(ranks, mine.data());
    inputs.back() = last.data();
    std::vector<T> mean(3, 7);
    reduce({number, number}, Reduce::average, mean.data(), inputs, std::vector<double>(ranks, 1.0), mean.size(), ranks);
    for (size_t i = 0; i < mean.size(); ++i) require(mean[i] == static_cast<T>(last[i] / ranks), "mean of integers");
  }
}

int main(int count, char** words) {
  require(count == 4 || count == 5, "usage: stress RANKS ROUNDS SEED [HOSTS]");
  const int ranks = std::atoi(words[1]), rounds = std::atoi(words[2]), host_count = count == 5 ? std::atoi(words[4]) : 1;
  const unsigned seed = static_cast<unsigned>(std::atoi(words[3]));
  mean_of<int8_t>(Number::i8);
  mean_of<uint8_t>(Number::u8);
  read_what_is_awaited();
  refuse_what_is_no_message();
  hear_what_came_last();
  meet_in_spite_of_signals();
  meet_in_a_crowd();
  const uint64_t token[2] = {11, 22};
  std::vector<std::vector<int>> hosts(host_count);
  for (int rank = 0; rank < ranks; ++rank) hosts[rank % host_count].push_back(rank);
  std::vector<Rank> all(ranks);
  std::vector<std::unique_ptr<Gate>> gates;
  std::vector<int> strangers;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::vector<int>& here = hosts[rank % host_count];
    const int local = rank / host_count, size = static_cast<int>(here.size());
    all[rank].room = local == 0 ? std::make_unique<Room>(Room::create(size, token), 0, size, token, here)
                                : std::make_unique<Room>(*all[here[0]].room, local);
    gates.push_back(std::make_unique<Gate>("127.0.0.1"));
    if (host_count > 1) strangers.push_back(stranger(*gates.back()));
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Rank& own = all[rank];
      host_count > 1 ? open(own, Places(rank, hosts), *gates[rank], gates) : open_alone(own);
      run(*own.group, *own.messenger, rank, ranks, rounds, seed);
      own.messenger.reset();
      if (host_count == 1) return;
      own.wire->end();
      own.wire->tell_failure("told after the end");
    });
  }
  for (std::thread& thread : threads) thread.join();
  while (!all.empty()) all.pop_back();  // a host's first rank last: it owns the memory
  for (const int each : strangers) close(each);
  take_turns(seed);
  std::puts("ok");
}

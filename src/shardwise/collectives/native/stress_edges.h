// What connections and gates meet outside of a healthy group, for the stress: bytes that come a few at a time,
// messages that no sender of this engine sends, signals, and crowds.
#pragma once

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/socket.h>

#include "gate.h"
#include "messages.h"
#include "turns.h"
#include "wire.h"

namespace shardwise {

constexpr int64_t kEdgePatience = 10 * kNanoseconds;

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::abort();
}

template <class Ready>
void await(const char* what, Ready ready) {
  for (const int64_t until = now() + kEdgePatience; !ready(); sched_yield()) require(now() < until, what);
}

// Both ends of a connection over loopback.
inline std::array<int, 2> connection() {
  const int listening = socket(AF_INET, SOCK_STREAM, 0), caller = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET, at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof at;
  auto* const address = reinterpret_cast<sockaddr*>(&at);
  require(bind(listening, address, size) == 0 && listen(listening, 1) == 0, "a socket that listens");
  require(getsockname(listening, address, &size) == 0 && connect(caller, address, size) == 0, "a call over loopback");
  const std::array<int, 2> ends{accept(listening, nullptr, nullptr), caller};
  close(listening);
  return ends;
}

// Rank 0 of a group whose rank 1, on another host, is the stress itself: it has the other ends.
struct ByHand {
  Sockets other{};
  std::unique_ptr<Room> room;
  std::unique_ptr<Wire> wire;

  ByHand() {
    const uint64_t token[2] = {1, 2};
    room = std::make_unique<Room>(Room::create(1, token), 0, 1, token, std::vector<int>{0});
    Sockets own{};
    for (int lane = 0; lane < kLanes; ++lane) {
      const std::array<int, 2> ends = connection();
      own[lane] = ends[0], other[lane] = ends[1];
    }
    const std::vector<Sockets> all{Sockets{{-1, -1, -1}}, own};
    wire = std::make_unique<Wire>(*room, all, std::vector<int>{0, 1}, std::vector<std::string>{"rank 0", "rank 1"});
  }
  ~ByHand() {
    for (const int socket : other) close(socket);
  }
  ByHand(const ByHand&) = delete;
  ByHand& operator=(const ByHand&) = delete;

  void put(Lane lane, const void* bytes, size_t count) const {
    require(::send(other[lane], bytes, count, MSG_NOSIGNAL) == static_cast<ssize_t>(count), "bytes of rank 1");
  }
  Peers peers() const { return Peers(*room, *wire, 0, {0, -1}, {0, 1}); }
};

// The end of what was posted first is read though it is small and more is posted, which rank 1 would not send before it
// has an answer.
inline void read_what_is_awaited() {
  constexpr uint64_t kChunk = 100 << 10, kFirst = 64 << 10;
  std::vector<char> chunk(kChunk), result(kChunk), sent(kChunk, 'x');
  const ByHand peer;
  const uint64_t until = peer.wire->receive(1, chunk.data(), kChunk);
  peer.wire->receive(1, result.data(), kChunk);
  peer.put(data, sent.data(), kFirst);
  await("the beginning of a chunk stays in the socket", [&] { return peer.wire->received(1) >= kFirst; });
  peer.put(data, sent.data(), kChunk - kFirst);
  await("the end of a chunk stays in the socket", [&] { return peer.wire->received(1) >= until; });
  require(chunk == sent, "a chunk that came in parts");
}

// A message of 8 bytes with tag 5 is awaited where such frames come: it ends with an error, and nothing else is written.
inline void refuse_frames(const std::vector<Frame>& frames, const char* words) {
  std::atomic<bool> told{false}, right{false};
  const auto done = [&](std::exception_ptr error, int) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const Failure& failure) {
      right.store(std::strstr(failure.what(), words) != nullptr);
    }
    told.store(true);
  };
  uint64_t memory = 0;
  const ByHand peer;
  Messenger messenger(peer.peers());
  messenger.receive(1, 5, 0, &memory, sizeof memory, 6 * kEdgePatience, done);
  for (const Frame& frame : frames) peer.put(mail, &frame, offsetof(Frame, data) + frame.length);
  await("a frame that is none goes unnoticed", [&] { return told.load(); });
  require(right.load(), words);
}

inline void refuse_what_is_no_message() {
  constexpr uint64_t kFar = 1 << 30;
  const char* const piece = "rank 1 sent a piece of a message that it had not begun";
  const Frame first{5, 0, 8, 0, 4, {}};
  refuse_frames({first, {5, 0, 2 * kFar, kFar, kFrameBytes, {}}}, piece);
  refuse_frames({first, {6, 0, 8, 4, 4, {}}}, piece);
  refuse_frames({first, first}, piece);
  refuse_frames({{5, 0, 8, 4, 4, {}}}, piece);
  refuse_frames({{6, 0, ~0ull, 0, 8, {}}}, "rank 0 could not move messages: ");  // more than any memory, to be kept aside
}

// A message comes together with the end of its connection.
inline void hear_what_came_last() {
  uint64_t memory = 0;
  std::atomic<bool> told{false};
  const auto done = [&](std::exception_ptr error, int) {
    require(!error, "a last message");
    told.store(true);
  };
  const ByHand peer;
  Messenger messenger(peer.peers());
  messenger.receive(1, 5, 0, &memory, sizeof memory, 6 * kEdgePatience, done);
  await("a messenger has something to do", [&] { return peer.room->member(0).bell.sleepers.load() != 0; });
  const int on = 1;
  setsockopt(peer.other[mail], IPPROTO_TCP, TCP_CORK, &on, sizeof on);  // else the end would come on its own
  const Frame last{5, 0, 8, 0, 8, {1}};
  peer.put(mail, &last, offsetof(Frame, data) + last.length);
  shutdown(peer.other[mail], SHUT_WR);
  await("nobody is woken for a last message", [&] { return told.load(); });
  require(memory == 1, "what a last message says");
}

// Rank 0 on one host, and others on a second one that call its gate.
struct Gates {
  std::vector<std::unique_ptr<Gate>> all;

  explicit Gates(int ranks) {
    for (int rank = 0; rank < ranks; ++rank) all.push_back(std::make_unique<Gate>("127.0.0.1"));
  }

  // What rank `own` is told where it does not come to its connections.
  std::string meet(int own, int64_t timeout) const {
    Gate::Party party{own, {1}, {2}, {}, {}, {}};
    for (size_t rank = 0; rank < all.size(); ++rank) {
      const bool is_remote = (rank == 0) != (own == 0);
      party.addresses.push_back(is_remote ? "127.0.0.1" : "");
      party.ports.push_back(all[rank]->port());
      party.who.push_back("rank " + std::to_string(rank));
    }
    try {
      for (const Sockets& sockets : all[own]->meet(party, timeout)) {
        for (const int socket : sockets) close(socket);
      }
      return "";
    } catch (const Failure& failure) {
      return failure.what();
    }
  }

  // How many have called rank 0 and not been heard, and said `bytes` or more.
  int waiting(unsigned bytes) const {
    std::FILE* const table = std::fopen("/proc/net/tcp", "r");
    require(table != nullptr, "no table of connections");
    const auto port = static_cast<unsigned>(std::atoi(all[0]->port().c_str()));
    int count = 0;
    for (char line[512]; std::fgets(line, sizeof line, table) != nullptr;) {
      unsigned at = 0, state = 0, unread = 0;
      const bool read = std::sscanf(line, " %*d: %*x:%x %*x:%*x %x %*x:%x", &at, &state, &unread) == 3;
      count += read && at == port && state == 1 /* established */ && unread >= bytes;
    }
    std::fclose(table);
    return count;
  }
};

// Calls at a gate and says nothing.
inline int silent_stranger(const Gate& gate) {
  const int caller = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET, to.sin_port = htons(static_cast<uint16_t>(std::atoi(gate.port().c_str())));
  inet_pton(AF_INET, gate.address().c_str(), &to.sin_addr);
  require(connect(caller, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0, "a stranger's call");
  return caller;
}

// A signal, as a profiler's, comes while a rank waits for its answer.
inline void meet_in_spite_of_signals() {
  static std::atomic<bool> came{false};
  struct sigaction notes{}, before{};
  notes.sa_handler = [](int) { came.store(true); };
  sigaction(SIGUSR1, &notes, &before);
  const Gates gates(2);
  std::string told;
  std::optional<WatchedThread> watched;
  std::atomic<bool> calls{false};
  std::thread caller([&] {
    watched.emplace();
    calls.store(true);
    told = gates.meet(1, kEdgePatience);
  });
  await("a rank does not call", [&] { return calls.load() && gates.waiting(1) == kLanes && watched->sleeps(); });
  pthread_kill(caller.native_handle(), SIGUSR1);
  await("a signal does not come", [&] { return came.load(); });
  const std::string own = gates.meet(0, kEdgePatience);
  caller.join();
  sigaction(SIGUSR1, &before, nullptr);
  require(own.empty() && told.empty(), (own + told).c_str());
  const std::string late = gates.meet(1, kNanoseconds / 20);
  require(late.find("rank 0 did not answer in time; is it the right network?") != late.npos, late.c_str());
}

// More ranks and strangers than a gate keeps in mind call rank 0 before it looks at anybody.
inline void meet_in_a_crowd() {
  constexpr int kRanks = 31, kStrangers = 300;
  const Gates gates(kRanks);
  std::vector<std::string> told(kRanks);
  std::vector<std::thread> callers;
  for (int rank = 1; rank < kRanks; ++rank) {
    callers.emplace_back([&, rank] { told[rank] = gates.meet(rank, kEdgePatience); });
  }
  await("a rank does not call", [&] { return gates.waiting(1) == (kRanks - 1) * kLanes; });
  std::vector<int> strangers;
  for (int i = 0; i < kStrangers; ++i) strangers.push_back(silent_stranger(*gates.all[0]));
  told[0] = gates.meet(0, kEdgePatience);
  for (std::thread& caller : callers) caller.join();
  for (const int stranger : strangers) close(stranger);
  for (const std::string& reason : told) require(reason.empty(), reason.c_str());
}

}  // namespace shardwise

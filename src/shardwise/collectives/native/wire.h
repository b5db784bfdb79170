// The TCP connections of one rank of a group to the ranks of other hosts, and the thread that moves bytes over them.
//
// Three connections a pair of ranks, so that none holds up another:
//   watch  heartbeats with the rank's last call, the text of a failure, a farewell; read at all times
//   data   what collectives move: bytes without frames, since both sides know from their calls what comes next
//   mail   frames of messages, out of and into rings like those of the shared memory
//
// Whoever posts bytes tries to move them at once; the thread moves the rest as the sockets take and give it, while the
// poster copies and adds. A socket that nobody waits for is not read, so TCP itself holds a fast sender back.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "room.h"

namespace shardwise {

enum Lane { watch, data, mail };
constexpr int kLanes = 3;
using Sockets = std::array<int, kLanes>;  // all -1 for a rank of this host

constexpr int64_t kBeat = kNanoseconds * 3 / 10;
constexpr int kSilenceMilliseconds = 1400;  // unacknowledged heartbeats for this long: the peer's host is out of reach

class Wire {
 public:
  // Takes the sockets over. `names` are the ranks by which messages call the members, `who` says more of each of them:
  // "rank 3 (process 12 at 10.0.0.2)".
  Wire(Room& room, const std::vector<Sockets>& sockets, std::vector<int> names, std::vector<std::string> who);
  ~Wire();
  // Sends the messages that are in the outboxes, says goodbye, and closes all connections. Whoever still has this wire may
  // go on calling it, and nothing moves. Once.
  void end();
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  struct Span {
    char* bytes;
    uint64_t count;
  };
  struct Posted : Span {
    bool ends;  // the last place of its call
  };

  // Post bytes of the data connection. The memory must stay until the position returned has been passed, and whoever waits
  // waits for such a position: what comes before it may be left in the socket until the rest is there too.
  uint64_t send(int peer, const void* bytes, uint64_t count) { return send(peer, {{/* only read */ const_cast<char*>(static_cast<const char*>(bytes)), count}}); }
  uint64_t receive(int peer, void* bytes, uint64_t count) { return receive(peer, {{static_cast<char*>(bytes), count}}); }
  // The same of bytes that lie in several places, and are one after the other on the connection.
  uint64_t send(int peer, const std::vector<Span>& spans);
  uint64_t receive(int peer, const std::vector<Span>& spans);
  uint64_t sent(int peer) const { return link(peer).sent.load(std::memory_order_acquire); }
  uint64_t received(int peer) const { return link(peer).received.load(std::memory_order_acquire); }
  uint64_t posted_out(int peer) const { return link(peer).posted_out; }
  uint64_t posted_in(int peer) const { return link(peer).posted_in; }
  // Drops what is posted: afterwards none of its memory is touched. The group is broken by then.
  void forget();
  // Changes whenever something posted is done, and when a peer fails or goes.
  Signal& moved() { return moved_; }

  // Rings of messages, and what to call after reading from or writing to one.
  Ring& outbox(int peer) const { return *link(peer).outbox; }
  Ring& inbox(int peer) const { return *link(peer).inbox; }
  void stir(int peer);

  void announce(const Call& call);             // what the heartbeats tell of this rank
  void tell(const std::string& failure);       // to all peers, once
  void tell_failure(const std::string& text);  // of this rank's program, as `Room::tell_failure`
  std::string gone(int peer) const;            // as `Room::gone`
  std::string silent(int peer) const;          // the same, once its last message has come too
  bool has_left(int peer) const;               // as `Room::left`
  // "... has failed: ..." if the peer has told so before it called number `sequence`; empty where it has not.
  std::string failed(int peer, uint64_t sequence) const;
  bool closed(int peer) const { return link(peer).data_closed.load(std::memory_order_acquire); }
  Call last_call(int peer, int64_t& heard) const;
  const std::string& who(int peer) const { return who_[peer]; }
  std::string called(int peer) const { return std::to_string(names_[peer]); }

 private:
  enum State : uint32_t { there, left, died, unreachable };
  struct Link {
    mutable std::mutex mutex;
    Sockets sockets{{-1, -1, -1}};
    std::array<uint32_t, kLanes> armed{};  // what epoll waits for
    std::deque<Posted> out, in;
    uint64_t posted_out = 0, posted_in = 0;  // of the posting thread alone
    std::atomic<uint64_t> sent{0}, received{0};
    std::atomic<uint32_t> state{there};
    std::atomic<bool> data_closed{false}, mail_closed{false};
    std::unique_ptr<Ring> outbox, inbox;
    uint64_t frame_out = 0, frame_in = 0;  // bytes of the ring's current frame that are through
    std::string words_out;                 // of the watch connection, not taken by the socket yet
    std::vector<char> words_in;
    Call last{};
    int64_t heard = 0;
    std::string failure;  // that the peer has told last
    uint32_t failures = 0;
    uint64_t failed_at = 0;  // the sequence number of its last call then
    uint64_t worth_waking = 1;  // bytes that have to have come before the data connection is read again
  };

  Link& link(int peer) const { return *links_[peer]; }
  void run();
  void beat();
  void serve(int peer, Lane lane);
  bool push_data(Link& link);
  bool pull_data(Link& link);
  void push_mail(Link& link);
  bool pull_mail(Link& link);
  bool accept_frame(const Link& link) const;
  void hear(int peer);
  void heed(int peer, std::string& failure);
  void say(Link& link, uint32_t kind, const std::string& text);
  void arm(Link& link, int peer, Lane lane, uint32_t events);
  void lose(Link& link, int peer, int error);
  void close_lane(Link& link, Lane lane);
  void leave();
  void finish_mail();

  Room& room_;
  const std::vector<int> names_;
  const std::vector<std::string> who_;
  std::vector<std::unique_ptr<Link>> links_;
  Signal moved_{};
  Signal* bell_;
  int poll_ = -1, waker_ = -1;  // of the thread; others use the first only while a socket is open
  std::atomic<bool> stopping_{false}, told_{false};
  std::mutex call_mutex_;
  Call call_{};
  std::thread thread_;
};

}  // namespace shardwise

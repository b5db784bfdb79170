// Messages with tags between two ranks, in any number at once.
//
// Each ordered pair of ranks has a ring of frames in the shared memory, or one at each end of a connection. A message is cut into frames; the ring's capacity is
// what a sender may be ahead of its receiver. A message whose tag nobody waits for yet is kept aside while other messages
// of its sender are awaited. A thread of its own moves frames as soon as there is more than a call can finish itself.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "peers.h"

namespace shardwise {

class Messenger {
 public:
  // Called once, on any thread: the error or null, and which rank the message came from.
  using Done = std::function<void(std::exception_ptr, int source)>;

  explicit Messenger(Peers peers);
  ~Messenger();  // what is still pending fails

  // The buffers must live until `done` is called. `peer` of `receive` is -1 for any rank.
  void send(int peer, int tag, int32_t dtype, const void* data, uint64_t bytes, int64_t timeout, Done done);
  void receive(int peer, int tag, int32_t dtype, void* data, uint64_t bytes, int64_t timeout, Done done);

 private:
  struct Transfer {
    Kind kind;
    int peer, tag;
    int32_t dtype;
    char* data;
    uint64_t bytes, moved;
    int64_t began, timeout;
    Done done;
  };
  // A message that is coming in: straight into its receiver's buffer, or kept aside.
  struct Arrival {
    int tag;
    int32_t dtype;
    uint64_t total;
    std::list<Transfer> receiver;  // one or none
    std::vector<char> aside;
    uint64_t came = 0;  // bytes of it
  };
  struct Peer {
    std::list<Transfer> outgoing;
    std::list<Arrival> arriving;  // one or none
    std::list<Arrival> kept;
  };
  struct Finished {
    Done done;
    std::exception_ptr error;
    int source;
  };

  void submit(Transfer transfer);
  void run();
  void progress();
  void push(int to);
  void pull(int from);
  bool start(int from, const Frame& frame);
  void check_continues(int from, const Frame& frame) const;
  void finish_arrival(int from);
  void deliver_kept(int from);
  void finish(Transfer& transfer, int source);
  std::list<Transfer> take_receiver(int from, int tag);
  bool wanted(int from) const;
  bool pending() const;
  void look_around(const std::vector<std::string>& gone);
  void look_at(const Transfer& transfer, const std::vector<std::string>& gone);
  void fail_all(std::exception_ptr error);
  void fail_all_by(const std::exception& error);
  void hand_over(std::unique_lock<std::mutex>& lock);
  void check_size(const Transfer& transfer, int from, int32_t dtype, uint64_t total);
  std::string describe(const Transfer& transfer) const;

  const Peers group_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::vector<Peer> peers_;
  std::list<Transfer> incoming_;
  std::deque<Finished> finished_;
  std::thread thread_;
  bool closing_ = false;
};

}  // namespace shardwise

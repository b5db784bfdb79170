// A barrier that says who does not come: each rank sends rank 0 a byte, and rank 0 answers when it has all of them.
#pragma once

#include <future>
#include <limits>
#include <string>
#include <vector>

#include "messages.h"

namespace shardwise {

// Messages of one byte between ranks, under way at once.
class BarrierMessages {
 public:
  BarrierMessages(Messenger& messenger, int64_t timeout) : messenger_(messenger), timeout_(timeout) {}
  ~BarrierMessages() {
    for (Message& message : all_) message.error.wait();  // the messenger writes to `byte_` until then
  }

  void send(int peer) {
    start(peer, [&](Messenger::Done done) { messenger_.send(peer, kTag, 0, &byte_, 1, timeout_, std::move(done)); });
  }
  void receive(int peer) {
    start(peer, [&](Messenger::Done done) { messenger_.receive(peer, kTag, 0, &byte_, 1, timeout_, std::move(done)); });
  }

  // The ranks whose message did not go through, once that is known of all; `error` is that of the first.
  std::vector<int> failed(std::exception_ptr* error) {
    std::vector<int> peers;
    for (Message& message : all_) {
      const std::exception_ptr failure = message.error.get();
      if (failure && peers.empty()) *error = failure;
      if (failure) peers.push_back(message.peer);
    }
    return peers;
  }

 private:
  static constexpr int kTag = std::numeric_limits<int>::min();  // which no program has
  struct Message {
    int peer;
    std::shared_future<std::exception_ptr> error;
  };

  template <class Start>
  void start(int peer, Start begin) {
    const auto over = std::make_shared<std::promise<std::exception_ptr>>();
    all_.push_back({peer, over->get_future().share()});
    try {
      begin([over](std::exception_ptr error, int) { over->set_value(error); });
    } catch (const Failure&) {  // of a broken group
      over->set_value(std::current_exception());
    }
  }

  Messenger& messenger_;
  const int64_t timeout_;
  char byte_ = 0;
  std::vector<Message> all_;
};

inline std::string what(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    return exception.what();
  }
}

// The key words of the errors are Gloo's.
class MonitoredBarrier {
 public:
  MonitoredBarrier(Messenger& messenger, const std::vector<int>& names, int64_t timeout)
      : messenger_(messenger), names_(names), timeout_(timeout), milliseconds_(std::to_string(timeout / 1000000) + " ms") {}

  void run(int rank, bool report_all) { rank == 0 ? of_first(report_all) : of_other(rank); }

 private:
  void of_first(bool report_all) {
    BarrierMessages arrivals(messenger_, timeout_), answers(messenger_, timeout_);
    for (size_t peer = 1; peer < names_.size(); ++peer) arrivals.receive(static_cast<int>(peer));
    std::exception_ptr error;
    std::vector<int> missing = arrivals.failed(&error);
    if (!missing.empty()) {
      if (!report_all) missing.resize(1);
      throw Failure("shardwise engine: Rank " + called(0) + " timed out in monitoredBarrier after " + milliseconds_ + ": Rank" +
                    listed(missing) + " failed to pass monitoredBarrier in " + milliseconds_ + ": " + what(error));
    }
    for (size_t peer = 1; peer < names_.size(); ++peer) answers.send(static_cast<int>(peer));
  }

  void of_other(int rank) {
    BarrierMessages messages(messenger_, timeout_);
    messages.send(0);
    messages.receive(0);
    std::exception_ptr error;
    if (messages.failed(&error).empty()) return;
    throw Failure("shardwise engine: Rank " + called(rank) +
                  " successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank " +
                  called(0) + ", which knows who is missing: " + what(error));
  }

  std::string called(int peer) const { return std::to_string(names_[peer]); }

  // As " 1", or "s 1, 2" of several.
  std::string listed(const std::vector<int>& peers) const {
    std::string text = peers.size() > 1 ? "s" : "";
    for (size_t i = 0; i < peers.size(); ++i) text += (i ? ", " : " ") + called(peers[i]);
    return text;
  }

  Messenger& messenger_;
  const std::vector<int>& names_;
  const int64_t timeout_;
  const std::string milliseconds_;
};

}  // namespace shardwise

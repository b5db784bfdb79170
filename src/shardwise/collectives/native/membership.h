// What one rank has of a group: memory, connections, threads; and how it ends.
//
// It may be dropped on any thread, with the interpreter's lock or without, at the interpreter's end, and in the child of a
// fork, which has a copy of its parent's memory and none of its threads.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include <pthread.h>
#include <torch/csrc/utils/pybind.h>

#include "meeting.h"
#include "messages.h"
#include "thread_pool.h"
#include "turns.h"

namespace shardwise {

// Lets go of the interpreter's lock, if this thread has it, while it waits for others that may need it.
class WithoutInterpreter {
 public:
  WithoutInterpreter() {
    if (Py_IsInitialized() && PyGILState_Check()) released_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> released_;
};

class Membership {
 public:
  Membership(Met met, const Places& places, const std::vector<int>& names)
      : room_(std::move(met.room)), wire_(std::move(met.wire)),
        peers_(wire_ ? Peers(*room_, *wire_, places.rank, in_room(places), names) : Peers(*room_)),
        group_(wire_ ? new Hosts(*room_, *wire_, places) : new Group(*room_)), messenger_(std::make_shared<Messenger>(peers_)) {}

  Group& group() { return *group_; }
  Turns& turns() { return *turns_; }
  const Peers& peers() const { return peers_; }
  std::shared_ptr<Messenger> messenger() {
    std::lock_guard<std::mutex> lock(lending_);
    if (!messenger_) throw Failure("shardwise engine: the group has been destroyed");
    return messenger_;
  }

  // What was called before is carried out, then the others learn that this rank has left. Once, and not on an engine's thread.
  void leave() {
    std::lock_guard<std::mutex> lock(leaving_);
    if (left_) return;
    turns_->stop();
    std::shared_ptr<Messenger> messenger;
    {
      std::lock_guard<std::mutex> lending(lending_);
      messenger.swap(messenger_);
    }
    messenger.reset();
    if (wire_) wire_->end();  // its memory stays: others may be about to tell it something
    room_->leave();
    left_ = true;
  }

  // The same, but what is not carried out by then ends with an error.
  void leave_by(int64_t until) {
    while (now() < until && !turns_->rest()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    room_->abandon();
    turns_->leave_callbacks();
    leave();
  }

 private:
  static std::vector<int> in_room(const Places& places) {
    std::vector<int> found;
    for (int peer = 0; peer < places.size(); ++peer) found.push_back(places.is_remote(peer) ? -1 : places.local[peer]);
    return found;
  }

  std::unique_ptr<Room> room_;
  std::unique_ptr<Wire> wire_;
  const Peers peers_;
  const std::unique_ptr<Group> group_;
  std::shared_ptr<Messenger> messenger_;
  std::mutex lending_, leaving_;
  bool left_ = false;
  const std::shared_ptr<Turns> turns_ = std::make_shared<Turns>();
};

// Those of this process.
class Memberships {
 public:
  static Memberships& of_process() {
    static Memberships* const all = new Memberships;  // never destroyed: threads may outlive static objects
    return *all;
  }

  uint64_t forks() const { return forks_; }

  void add(const std::shared_ptr<Membership>& membership) {
    std::lock_guard<std::mutex> lock(mutex_);
    all_.insert(membership);
  }

  void remove(const std::shared_ptr<Membership>& membership) {
    std::lock_guard<std::mutex> lock(mutex_);
    all_.erase(membership);
    if (all_.empty()) ThreadPool::of_process().release();
  }

  // Tells an error of this process to the other ranks of all its groups.
  void tell_failure(const std::string& text) {
    for (const auto& each : snapshot()) each->peers().tell_failure(text);
  }

  // Before the interpreter ends: what is under way has `patience` nanoseconds, and no thread needs the interpreter after.
  void leave_all(int64_t patience) {
    const int64_t until = now() + patience;
    for (const auto& each : snapshot()) {
      each->leave_by(until);
      remove(each);
    }
    ThreadPool::of_process().end(until);
  }

 private:
  Memberships() {
    pthread_atfork([] { of_process().mutex_.lock(); }, [] { of_process().mutex_.unlock(); },
                   [] {
                     Memberships& all = of_process();
                     new std::set<std::shared_ptr<Membership>>(std::move(all.all_));  // the parent's: nothing of them ends here
                     all.all_ = {};
                     ++all.forks_;
                     ThreadPool::forget_parents();
                     all.mutex_.unlock();
                   });
  }

  std::vector<std::shared_ptr<Membership>> snapshot() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {all_.begin(), all_.end()};
  }

  std::mutex mutex_;
  std::set<std::shared_ptr<Membership>> all_;
  uint64_t forks_ = 0;
};

// What a backend holds of its membership; ends it when dropped.
class Ticket {
 public:
  Ticket() = default;
  Ticket(Met met, const Places& places, const std::vector<int>& names)
      : membership_(std::make_shared<Membership>(std::move(met), places, names)), process_(Memberships::of_process().forks()) {
    Memberships::of_process().add(membership_);
  }
  ~Ticket() { leave(); }
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  bool is_of_parent() const { return process_ != Memberships::of_process().forks(); }

  Membership* operator->() const {
    TORCH_CHECK(!is_of_parent(),
                "shardwise engine: this process is a fork, and a group belongs to the process that made it: start processes "
                "before init_process_group, or by `spawn`, and make a group in the new one");
    return membership_.get();
  }

  void leave() {
    if (!membership_) return;
    if (is_of_parent()) {
      new std::shared_ptr<Membership>(std::move(membership_));
      return;
    }
    Memberships::of_process().remove(membership_);
    if (on_engine_thread) {
      std::thread([membership = membership_] { membership->leave(); }).detach();
      return;
    }
    const WithoutInterpreter others_go_on;
    membership_->leave();
  }

 private:
  std::shared_ptr<Membership> membership_;
  uint64_t process_ = 0;
};

}  // namespace shardwise

// The ranks of a group as messages see them: those of this host through its memory, the others through connections.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "room.h"
#include "wire.h"

namespace shardwise {

class Peers {
 public:
  // A group on one host: the room has them all.
  explicit Peers(Room& room) : rank(room.rank), size(room.size), room_(room), names_(room.names) {
    for (int peer = 0; peer < size; ++peer) in_room_.push_back(peer);
  }
  // `in_room` is each rank's number in the room, or -1 for one of another host; `names` as those of the room.
  Peers(Room& room, Wire& wire, int rank, std::vector<int> in_room, std::vector<int> names)
      : rank(rank), size(static_cast<int>(names.size())), room_(room), wire_(&wire), in_room_(std::move(in_room)),
        names_(std::move(names)) {}

  const int rank, size;

  Ring& to(int peer) const { return is_here(peer) ? room_.ring(room_.rank, in_room_[peer]) : wire_->outbox(peer); }
  Ring& from(int peer) const { return is_here(peer) ? room_.ring(in_room_[peer], room_.rank) : wire_->inbox(peer); }
  // After a ring to or from it was used.
  void notify(int peer) const { is_here(peer) ? room_.member(in_room_[peer]).bell.add() : wire_->stir(peer); }
  Signal& bell() const { return room_.member(room_.rank).bell; }

  std::string called(int peer) const { return std::to_string(names_[peer]); }
  std::string gone(int peer) const { return is_here(peer) ? room_.gone(in_room_[peer]) : wire_->silent(peer); }
  bool left(int peer) const { return is_here(peer) ? room_.left(in_room_[peer]) : wire_->has_left(peer); }
  void throw_if_broken() const { room_.throw_if_broken(); }
  void resume() const { room_.resume(); }
  // As `Room::tell_failure`, on all hosts.
  void tell_failure(const std::string& text) const {
    room_.tell_failure(text);
    if (wire_) wire_->tell_failure(text);
  }
  // As `Room::fail`, on all hosts.
  [[noreturn]] void fail(const std::string& reason) const {
    try {
      room_.fail(reason);
    } catch (const Failure& failure) {
      if (wire_) wire_->tell(failure.what());
      throw;
    }
  }

 private:
  bool is_here(int peer) const { return in_room_[peer] >= 0; }

  Room& room_;
  Wire* wire_ = nullptr;
  std::vector<int> in_room_, names_;
};

}  // namespace shardwise

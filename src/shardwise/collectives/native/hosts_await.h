// Templates of `Hosts` that its two files share.
#pragma once

#include "hosts.h"

namespace shardwise {

template <class Body>
void Hosts::operate(Call call, int64_t timeout, Body body) {
  try {
    begin(call, timeout);
    wire_.announce(call_);
    for (Greeted& each : greeted_) each.open = false;
    body();
    await_all();
  } catch (const std::exception& error) {
    wire_.forget();
    scratch_.reset();
    break_room(error);
    wire_.tell(error.what());
    throw;
  }
  scratch_.reset();
}

// What has come is not looked at before the heading in front of it was.
template <class Ready>
void Hosts::await(Ready ready) {
  Signal& moved = wire_.moved();
  int64_t looked = now();
  while (true) {
    const uint32_t seen = moved.value.load(std::memory_order_acquire);
    const bool enough = ready();
    check_headings();
    if (ready()) {
      if (enough) return;
      continue;  // it is enough since a moment ago, or by the headings: nobody would wake this rank again
    }
    if (room_.header().broken.load(std::memory_order_acquire) != 0) room_.throw_if_broken();
    moved.wait(seen);
    if (now() - looked < kLookAround) continue;
    looked = now();
    if (!ready()) look_at_hosts();
  }
}

}  // namespace shardwise

// Words by which the stager and the mover of a job's layers report progress: plain
// memory, pinned or of a device, each word with one writer.  No thread sleeps on it and no call
// wakes anybody.
#pragma once

#include "gio_uring/atomics.h"

namespace gio {

// Reports the end of a layer.
struct LayerWord {
  u32 ready;   // not 0 once every command of the layer ended, or was given up; released last
  u32 status;  // valid with `ready`: the first error by then, or 0
};
static_assert(sizeof(LayerWord) == 8, "layout shared with Python");

// What a job of the host's engine and the mover of its staging memory tell each other.
struct LayerWords {
  u32 moved;  // by the mover alone: how many layers it has finished, from the first
  u32 reserved[31];
  LayerWord layers[1];  // n_layers of them
};
static_assert(sizeof(LayerWords) == 136, "layout shared with Python");

}  // namespace gio

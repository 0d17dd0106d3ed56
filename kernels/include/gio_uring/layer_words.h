// Words by which the engine that stages a job's layers and their mover report progress: in pinned
// or device memory, each with one writer.  They are polled: no thread sleeps on them.
#pragma once

#include "gio_uring/atomics.h"

namespace gio {

// Reports the end of a layer.
struct LayerWord {
  u32 ready;   // not 0 once every command of the layer ended, or was given up; released last
  u32 status;  // valid with `ready`: the first error by then, or 0
};
static_assert(sizeof(LayerWord) == 8, "layout shared with Python");

// Progress of a job of the host engine and of the mover of its staging memory.
struct LayerWords {
  u32 moved;  // by the mover alone: how many layers it has finished, from the first
  u32 reserved[31];
  LayerWord layers[1];  // n_layers of them
};
static_assert(sizeof(LayerWords) == 136, "layout shared with Python");

}  // namespace gio

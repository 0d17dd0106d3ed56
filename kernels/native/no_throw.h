// Wraps functions of the C interface, because an exception must not reach the caller.
#pragma once

#include <cerrno>
#include <new>
#include <system_error>

namespace gio {

// Returns the result of `call`; -ENOMEM without memory, -EAGAIN without threads.
template <class Call>
int without_exceptions(Call call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  } catch (const std::system_error&) {
    return -EAGAIN;
  }
}

}  // namespace gio

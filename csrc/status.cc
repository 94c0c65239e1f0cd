#include "status.h"

#include <stdarg.h>
#include <stdio.h>

namespace engram {

static thread_local char last_error[1024] = "";

engram_status fail(engram_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace engram

const char* engram_last_error(void) { return engram::last_error; }
int32_t engram_abi_version(void) { return ENGRAM_ABI_VERSION; }

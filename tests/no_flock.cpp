// Preloaded, it answers every flock() as a file system without locks does: with the error number $FLOCK_ERRNO.
#include <sys/file.h>

#include <cerrno>
#include <cstdlib>

extern "C" int flock(int /*fd*/, int /*operation*/) noexcept {
  errno = std::atoi(std::getenv("FLOCK_ERRNO"));
  return -1;
}

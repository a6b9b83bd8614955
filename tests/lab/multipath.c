/* Preloaded, makes every TCP socket of a program a multipath one (MPTCP, RFC 8684), as mptcpize does.
 *
 * SO_REUSEADDR, which MPTCP refuses on a connection that is established, has no meaning there.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>

#define MPTCP 262

int socket(int domain, int type, int protocol) {
  int (*real)(int, int, int) = (int (*)(int, int, int))dlsym(RTLD_NEXT, "socket");
  int is_stream = (type & 0xf) == SOCK_STREAM && (protocol == 0 || protocol == IPPROTO_TCP);
  return real(domain, type, domain == AF_INET && is_stream ? MPTCP : protocol);
}

int setsockopt(int descriptor, int level, int name, const void *value, socklen_t length) {
  int (*real)(int, int, int, const void *, socklen_t) =
      (int (*)(int, int, int, const void *, socklen_t))dlsym(RTLD_NEXT, "setsockopt");
  int failed = real(descriptor, level, name, value, length);
  return failed && errno == EINVAL && level == SOL_SOCKET && name == SO_REUSEADDR ? 0 : failed;
}

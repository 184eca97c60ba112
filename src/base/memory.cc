#include "base/memory.hpp"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace statepack {

std::int64_t available_bytes() {
  std::int64_t available = std::numeric_limits<std::int64_t>::max();
  std::ifstream meminfo("/proc/meminfo");
  std::string word;
  while (meminfo >> word) {
    std::int64_t kib = 0;
    if (word == "MemAvailable:" && meminfo >> kib) available = kib * 1024;
  }
  const auto number_in = [](const std::string& path, std::int64_t otherwise) {
    std::ifstream file(path);
    std::int64_t number = 0;
    return file >> number ? number : otherwise;  // the word "max" means no limit
  };
  std::ifstream membership("/proc/self/cgroup");
  std::string line, group;
  while (std::getline(membership, line)) {
    if (line.starts_with("0::")) group = line.substr(3);
  }
  for (;;) {
    const std::string folder = "/sys/fs/cgroup" + group;
    const std::int64_t limit =
        number_in(folder + "/memory.max", std::numeric_limits<std::int64_t>::max());
    if (limit < std::numeric_limits<std::int64_t>::max()) {
      // Files that were read long ago count as used, but the kernel drops them on demand.
      std::int64_t reclaimable = 0;
      std::ifstream stat(folder + "/memory.stat");
      while (stat >> word) {
        std::int64_t value = 0;
        if (stat >> value && word == "inactive_file") reclaimable = value;
      }
      const std::int64_t used = number_in(folder + "/memory.current", 0) - reclaimable;
      available = std::min(available, limit - used);
    }
    if (group.empty() || group == "/") return std::max<std::int64_t>(0, available);
    const std::size_t parent = group.rfind('/');
    group.resize(parent == std::string::npos ? 0 : parent);
  }
}

}  // namespace statepack

// Which combinations of factors are tried.
#pragma once

#include <cstdint>
#include <vector>

namespace onescale::parity {

using Combination = std::vector<int>;  // a level of each factor

// A small set in which every two levels of two factors meet: greedy, each new combination starts from a pair that is
// missing and takes for every other factor the level that adds the most missing pairs.
inline std::vector<Combination> pairwise(const std::vector<int>& levels) {
  const std::size_t n = levels.size();
  std::vector<std::vector<std::vector<std::vector<bool>>>> met(n);
  for (std::size_t a = 0; a < n; ++a) {
    for (std::size_t b = 0; b < n; ++b) {
      met[a].emplace_back(static_cast<std::size_t>(levels[a]),
                          std::vector<bool>(static_cast<std::size_t>(levels[b]), false));
    }
  }
  const auto is_met = [&](std::size_t a, int i, std::size_t b, int j) {
    return met[a][b][static_cast<std::size_t>(i)][static_cast<std::size_t>(j)];
  };
  std::vector<Combination> all;
  for (std::size_t a = 0; a < n; ++a) {
    for (std::size_t b = a + 1; b < n; ++b) {
      for (int i = 0; i < levels[a]; ++i) {
        for (int j = 0; j < levels[b]; ++j) {
          if (is_met(a, i, b, j)) continue;
          Combination c(n, -1);
          c[a] = i, c[b] = j;
          for (std::size_t f = 0; f < n; ++f) {
            if (c[f] >= 0) continue;
            int most = -1;
            for (int step = 0; step < levels[f]; ++step) {
              // Ties go to another level each time.
              const int level = (step + static_cast<int>(all.size())) % levels[f];
              int added = 0;
              for (std::size_t g = 0; g < n; ++g) added += c[g] >= 0 && g != f && !is_met(f, level, g, c[g]) ? 1 : 0;
              if (added > most) most = added, c[f] = level;
            }
          }
          for (std::size_t f = 0; f < n; ++f) {
            for (std::size_t g = 0; g < n; ++g)
              met[f][g][static_cast<std::size_t>(c[f])][static_cast<std::size_t>(c[g])] = true;
          }
          all.push_back(c);
        }
      }
    }
  }
  return all;
}

// All levels of the first `full` factors, the others in turn by a fixed mixing.
inline std::vector<Combination> grid(const std::vector<int>& levels, std::size_t full) {
  std::vector<Combination> all;
  Combination c(levels.size(), 0);
  for (std::uint64_t count = 0;; ++count) {
    std::uint64_t mixed = (count + 1) * 0x9E3779B97F4A7C15;
    for (std::size_t f = full; f < levels.size(); ++f) {
      mixed ^= mixed >> 29, mixed *= 0xBF58476D1CE4E5B9;
      c[f] = static_cast<int>((mixed >> 33) % static_cast<std::uint64_t>(levels[f]));
    }
    all.push_back(c);
    std::size_t f = 0;
    while (f < full && ++c[f] == levels[f]) c[f++] = 0;
    if (f == full) return all;
  }
}

}  // namespace onescale::parity

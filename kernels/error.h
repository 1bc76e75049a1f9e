// Every error of the program is one sentence: what, which value, where, how to fix it.
#pragma once

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace onescale {

inline constexpr std::size_t longest_sentence = 400;  // bytes

// A text as one line of at most `most` bytes: of a longer one the two ends, cut between characters of UTF-8.
inline std::string shortened(std::string text, std::size_t most = longest_sentence) {
  if (text.size() > most) {
    const auto inside = [&](std::size_t i) { return (static_cast<unsigned char>(text[i]) & 0xC0U) == 0x80; };
    std::size_t head = (most - 3) / 2, tail = text.size() - (most - 3 - head);
    for (int i = 0; i < 3; ++i) head -= inside(head) ? 1 : 0, tail += inside(tail) ? 1 : 0;
    text.replace(head, tail - head, "...");
  }
  std::replace_if(
      text.begin(), text.end(), [](char c) { return (c >= 0 && c < ' ') || c == 0x7F; }, '?');
  return text;
}

// A failure while running: exit code 1.
struct Error : std::runtime_error {
  explicit Error(const std::string& sentence) : runtime_error(shortened(sentence)) {}
};

// A wrong command line, configuration or combination of settings: exit code 2.
struct UsageError : Error {
  using Error::Error;
};

// The arguments written one after the other, as operator<< writes them.
template <class... Args>
std::string str(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

// The same as a sentence: where it would be too long, its texts are shortened before the whole is.
template <class... Args>
std::string brief(const Args&... args) {
  const auto part = []<class T>(const T& value) {
    if constexpr (std::is_same_v<T, std::string>) return shortened(value, 120);
    return value;
  };
  const std::string text = str(args...);
  return text.size() <= longest_sentence ? text : shortened(str(part(args)...));
}

template <class... Args>
void check(bool ok, const Args&... sentence) {
  if (!ok) throw Error(brief(sentence...));
}

template <class... Args>
void check_usage(bool ok, const Args&... sentence) {
  if (!ok) throw UsageError(brief(sentence...));
}

}  // namespace onescale

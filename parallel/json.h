// JSON values, as much as config.json, safetensors headers, JSON lines and metrics need. Only json.cpp includes the
// library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace onescale {

// A value with shared ownership: copies refer to the same JSON, at() to a part of it. Reading a value of
// another type throws Error naming where the text came from, the key and what was found. Adding to a value ends the
// life of its parts.
class Json {
 public:
  using Scalar = std::variant<std::nullptr_t, bool, std::int64_t, double, std::string>;
  static Json object(std::initializer_list<std::pair<const char*, Scalar>> fields = {});
  static Json array();
  // Takes linear time. Throws Error "<where>: line L, column C: ..." for a text that is not JSON, holds a key twice in
  // an object, nests deeper than 100, or has anything after the value.
  static Json parse(std::string_view text, const std::string& where);
  static Json read_file(const std::string& path);

  bool is_object() const;
  bool is_array() const;
  bool is_null() const;
  bool has(const std::string& key) const;                   // present, even when null
  std::vector<std::pair<std::string, Json>> items() const;  // of an object, in the order of the text
  std::int64_t size() const;

  Json at(const std::string& key) const;  // throws when absent
  Json at(std::int64_t index) const;
  std::string string() const;
  std::int64_t integer() const;  // refuses fractions and what does not fit
  double number() const;
  bool boolean() const;

  void set(const std::string& key, const Json& value);
  void set(const std::string& key, const Scalar& value);
  void push(const Scalar& value);

  std::string dump(int indent = -1) const;  // -1: one line. Doubles are written so that they read back equal

 private:
  Json(nlohmann::ordered_json value, const std::string& where);
  Json part(nlohmann::ordered_json& value, const std::string& key) const;
  template <class T>
  T get(bool is_one, const char* expected) const;

  std::shared_ptr<nlohmann::ordered_json> root_;
  nlohmann::ordered_json* value_ = nullptr;
  std::string where_;
};

}  // namespace onescale

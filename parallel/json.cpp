// Json over nlohmann's ordered_json; the only file that includes the library.
#include "parallel/json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>
#include <unordered_set>
#include <utility>

#include "kernels/error.h"
#include "parallel/file.h"

namespace onescale {
namespace {

using Value = nlohmann::ordered_json;

constexpr std::size_t deepest = 100;        // brackets in brackets; the library writes and compares values by recursion
constexpr std::size_t longest_value = 160;  // in a sentence

std::string position(std::string_view text, std::size_t offset) {
  const std::string_view before = text.substr(0, offset);
  const std::size_t line_start = before.rfind('\n') + 1;  // 0 where there is none
  return str("line ", std::count(before.begin(), before.end(), '\n') + 1, ", column ", offset - line_start + 1);
}

// "[json.exception...] parse error at line 1, column 2: <what is wanted>"
std::string detail(const std::string& what) {
  std::size_t begin = what.find("column ");
  begin = begin == std::string::npos ? what.find("] ") : what.find(": ", begin);
  return shortened(begin == std::string::npos ? what : what.substr(begin + 2), longest_value);
}

// The value as text, made only where a sentence is written.
struct shown {
  explicit shown(const Value& value) : value(value) {}
  const Value& value;
};

std::ostream& operator<<(std::ostream& out, const shown& s) {
  return out << shortened(s.value.dump(-1, ' ', false, Value::error_handler_t::replace), longest_value);
}

// Makes what the library's own reader would make of a text, but in linear time (that one looks through all keys of an
// object for each), without a key that is there twice, and no deeper than what works by recursion may go.
class Builder : public nlohmann::json_sax<Value> {
 public:
  Builder(std::string_view text, const std::string& where) : text_(text), where_(where), in_(std::string(text)) {}

  Value build() {
    const std::size_t nul = text_.find('\0');  // the library takes one for the end of its input
    if (nul != std::string_view::npos) fail(nul, "not valid JSON: a NUL byte; correct it");
    Value::sax_parse(in_, this);
    return std::move(root_);
  }

  bool null() override { return put(nullptr) != nullptr; }
  bool boolean(bool value) override { return put(value) != nullptr; }
  bool number_integer(std::int64_t value) override { return put(value) != nullptr; }
  bool number_unsigned(std::uint64_t value) override { return put(value) != nullptr; }
  bool number_float(double value, const std::string&) override { return put(value) != nullptr; }
  bool string(std::string& value) override { return put(std::move(value)) != nullptr; }
  bool binary(Value::binary_t&) override { return false; }  // of other formats
  bool start_object(std::size_t) override { return open(Value::object()); }
  bool start_array(std::size_t) override { return open(Value::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(std::string& key) override {
    if (!open_.back().keys.insert(key).second)
      fail(read(),
           str("the key \"", shortened(key, longest_value), "\" appears twice in one object; keep one of them"));
    key_ = std::move(key);
    return true;
  }
  // `byte` counts from 1 and is the last character read.
  bool parse_error(std::size_t byte, const std::string&, const nlohmann::detail::exception& e) override {
    fail(byte > 0 ? byte - 1 : 0, str("not valid JSON: ", detail(e.what()), "; correct it"));
  }

 private:
  struct Open {
    Value* value;
    std::unordered_set<std::string> keys;
  };

  std::size_t read() { return static_cast<std::size_t>(in_.rdbuf()->pubseekoff(0, std::ios::cur, std::ios::in)); }
  [[noreturn]] void fail(std::size_t offset, const std::string& what) const {
    throw Error(brief(where_, ": ", position(text_, offset), ": ", what));
  }

  Value* put(Value value) {
    if (open_.empty()) return &(root_ = std::move(value));
    Value& parent = *open_.back().value;
    if (parent.is_array()) return &parent.get_ref<Value::array_t&>().emplace_back(std::move(value));
    auto& members = static_cast<Value::object_t::Container&>(parent.get_ref<Value::object_t&>());
    return &members.emplace_back(std::move(key_), std::move(value)).second;
  }
  bool open(Value value) {
    if (open_.size() == deepest) fail(read() - 1, str("brackets are nested deeper than ", deepest, "; flatten them"));
    open_.push_back({put(std::move(value)), {}});
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  std::string_view text_;
  const std::string& where_;
  std::istringstream in_;
  Value root_;
  std::vector<Open> open_;  // from the outermost bracket to the innermost
  std::string key_;         // of the value to come
};

}  // namespace

Json::Json(Value value, const std::string& where)
    : root_(std::make_shared<Value>(std::move(value))), value_(root_.get()), where_(where) {}

Json Json::object(std::initializer_list<std::pair<const char*, Scalar>> fields) {
  Json json{Value::object(), "JSON"};
  for (const auto& [key, value] : fields) json.set(key, value);
  return json;
}

Json Json::array() {
  return {Value::array(), "JSON"};
}

Json Json::parse(std::string_view text, const std::string& where) {
  return {Builder(text, where).build(), where};
}

Json Json::read_file(const std::string& path) {
  return parse(read_text(path), path);
}

bool Json::is_object() const {
  return value_->is_object();
}
bool Json::is_array() const {
  return value_->is_array();
}
bool Json::is_null() const {
  return value_->is_null();
}
bool Json::has(const std::string& key) const {
  return value_->is_object() && value_->contains(key);
}

std::vector<std::pair<std::string, Json>> Json::items() const {
  check(is_object(), where_, " is ", shown(*value_), ", expected an object");
  std::vector<std::pair<std::string, Json>> all;
  for (auto& [key, value] : value_->get_ref<Value::object_t&>()) all.emplace_back(key, part(value, key));
  return all;
}

std::int64_t Json::size() const {
  return static_cast<std::int64_t>(value_->size());
}

Json Json::at(const std::string& key) const {
  check(is_object(), where_, " is ", shown(*value_), ", expected an object with the key \"", key, "\"");
  const auto found = value_->find(key);
  check(found != value_->end(), where_, " has no key \"", key, "\"");
  return part(*found, key);
}

Json Json::part(Value& value, const std::string& key) const {
  Json part = *this;
  part.value_ = &value;
  part.where_ += (value_ == root_.get() ? ": " : ".") + shortened(key, longest_value);
  return part;
}

Json Json::at(std::int64_t index) const {
  check(is_array(), where_, " is ", shown(*value_), ", expected an array");
  check(index >= 0 && index < size(), where_, " has ", size(), " elements, none at index ", index);
  Json part = *this;
  part.value_ = &(*value_)[static_cast<std::size_t>(index)];
  part.where_ += str("[", index, "]");
  return part;
}

template <class T>
T Json::get(bool is_one, const char* expected) const {
  check(is_one, where_, " is ", shown(*value_), ", expected ", expected);
  return value_->get<T>();
}

std::string Json::string() const {
  return get<std::string>(value_->is_string(), "a string");
}

std::int64_t Json::integer() const {
  const auto value = get<std::int64_t>(value_->is_number_integer(), "a whole number");
  check(value >= 0 || !value_->is_number_unsigned(), where_, " is ", shown(*value_), ", which does not fit in 64 bits");
  return value;
}

double Json::number() const {
  return get<double>(value_->is_number(), "a number");
}

bool Json::boolean() const {
  return get<bool>(value_->is_boolean(), "true or false");
}

void Json::set(const std::string& key, const Json& value) {
  (*value_)[key] = *value.value_;
}
void Json::set(const std::string& key, const Scalar& value) {
  std::visit([&](const auto& v) { (*value_)[key] = v; }, value);
}
void Json::push(const Scalar& value) {
  std::visit([&](const auto& v) { value_->push_back(v); }, value);
}

// A string that is not UTF-8 (bytes of a sample) is written with replacement characters instead of failing.
std::string Json::dump(int indent) const {
  return value_->dump(indent, ' ', false, Value::error_handler_t::replace);
}

}  // namespace onescale

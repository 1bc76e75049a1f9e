// Safetensors files: 8 bytes of header length, a JSON header, then the tensors' bytes without holes. Reading trusts
// nothing; writing needs one tensor at a time in memory and gives each a checksum.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "parallel/file.h"

struct XXH3_state_s;

namespace onescale {

enum class FileType : std::uint8_t { F64, F32, F16, BF16, I64, I32, I16, I8, U8, BOOL };

std::int64_t size_of(FileType type);
const char* name_of(FileType type);  // as in the header: "F32"

struct StoredTensor {
  std::string name;
  FileType type = FileType::F32;
  std::vector<std::int64_t> shape;
  std::int64_t offset = 0;  // of the first byte, from the start of the file; unused when writing
  std::size_t file = 0;     // its number among those of a SafetensorsReader

  std::int64_t numel() const;
  std::int64_t bytes() const { return numel() * size_of(type); }
  std::string describe() const;  // "wte.weight F32 [99, 48]"
};

// XXH3-64 as 16 hexadecimal digits.
std::string checksum(const void* data, std::size_t bytes);

// Reading. Throws DamagedFile for a file that is too short, holds no valid header, or whose tensors overlap, leave
// holes or do not end where the file does.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::string& path);
  // DIR/STEM.safetensors, or all files that DIR/STEM.safetensors.index.json names, as one collection of tensors.
  SafetensorsReader(const std::string& dir, const std::string& stem);

  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // file by file, in the order of their bytes
  const StoredTensor& at(const std::string& name) const;                 // throws when absent
  const StoredTensor* find(const std::string& name) const;               // nullptr when absent
  const std::string& path(const StoredTensor& tensor) const { return files_[tensor.file].path(); }

  // Elements [first, first + count) in row-major order; T is float, double or int64_t. The first two take F64, F32, F16
  // and BF16, the last the integer types; another type is refused. F64 is rounded to float, everything else is exact.
  template <class T>
  void read(const StoredTensor& tensor, std::int64_t first, std::int64_t count, T* out) const;
  // Of all bytes of the tensor, read in pieces.
  std::string checksum(const StoredTensor& tensor) const;

 private:
  void add(const std::string& path);

  std::string where_;  // the file, or the directory of several
  std::vector<File> files_;
  std::vector<StoredTensor> tensors_;
  std::map<std::string, std::size_t> by_name_;
};

// Bytes of the file that would hold these tensors.
std::int64_t file_bytes(const std::vector<StoredTensor>& tensors);

// Writing: the header at once, then every tensor's elements in the order of the list, in pieces of any size. The file
// has its name from close() on, see File::create().
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::string& path, std::vector<StoredTensor> tensors);

  // The next bytes of the tensor whose turn it is.
  void write_bytes(const void* data, std::int64_t bytes);
  // The next elements of a tensor of F32, or of BF16, to which they are rounded, to nearest even.
  void write(const float* values, std::int64_t count);
  // Throws unless every tensor is whole, then waits until the file is on the disk.
  void close();
  // By tensor name, of the bytes written; complete after close().
  const std::map<std::string, std::string>& checksums() const { return checksums_; }

 private:
  void finish_tensor();

  File file_;
  std::vector<StoredTensor> tensors_;
  std::size_t current_ = 0;
  std::int64_t written_ = 0;  // bytes of the current tensor
  std::shared_ptr<XXH3_state_s> state_;
  std::map<std::string, std::string> checksums_;
};

}  // namespace onescale

//! Compiled kernels on disk, so that only the first start on a machine compiles.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A folder of entries. An entry holds its whole key, so that none is taken for another whose name is the same.
#[derive(Debug)]
pub(crate) struct Cache(Option<PathBuf>);

/// Why an entry cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("compiled kernels cannot be kept in {}: {cause}", folder.display())]
pub(crate) struct CacheError {
    folder: PathBuf,
    cause: io::Error,
}

impl Cache {
    /// A cache in this folder, which is created when the first entry is written. Without a folder nothing is kept.
    pub(crate) fn new(folder: Option<PathBuf>) -> Cache {
        Cache(folder)
    }

    /// The value that was put under this key.
    pub(crate) fn get(&self, key: &str) -> Option<Vec<u8>> {
        let entry = fs::read(place(self.0.as_deref()?, key)).ok()?;
        let (checksum, rest) = entry.split_first_chunk::<4>()?;
        let value = rest.strip_prefix(key.as_bytes())?.strip_prefix(b"\0")?;
        (crc32c::crc32c(rest) == u32::from_le_bytes(*checksum)).then(|| value.to_vec())
    }

    /// Keeps a value. A reader sees all of it or nothing.
    pub(crate) fn put(&self, key: &str, value: &[u8]) -> Result<(), CacheError> {
        let Some(folder) = &self.0 else { return Ok(()) };
        let rest = [key.as_bytes(), b"\0", value].concat();
        let path = place(folder, key);
        let beside = path.with_extension(format!("{}.tmp", std::process::id()));
        let write = || {
            fs::create_dir_all(folder)?;
            let mut file = fs::File::create(&beside)?;
            file.write_all(&crc32c::crc32c(&rest).to_le_bytes())?;
            file.write_all(&rest)?;
            fs::rename(&beside, &path)
        };
        write().map_err(|cause| {
            let _ = fs::remove_file(&beside);
            CacheError { folder: folder.clone(), cause }
        })
    }
}

fn place(folder: &Path, key: &str) -> PathBuf {
    folder.join(format!("{:08x}.cubin", crc32c::crc32c(key.as_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_put_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(Some(folder.path().join("made")));
        assert_eq!(cache.get("key"), None);
        cache.put("key", b"value\0more").unwrap();
        assert_eq!(cache.get("key").as_deref(), Some(&b"value\0more"[..]));
        assert_eq!(cache.get("other"), None);
        // Another key that came to the same place
        let path = place(&folder.path().join("made"), "key");
        fs::copy(&path, place(&folder.path().join("made"), "other")).unwrap();
        assert_eq!(cache.get("other"), None);
        // And every kind of damage
        let whole = fs::read(&path).unwrap();
        for place in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[place] ^= 1;
            fs::write(&path, &damaged).unwrap();
            assert_eq!(cache.get("key"), None, "at {place}");
            fs::write(&path, &whole[..place]).unwrap();
            assert_eq!(cache.get("key"), None, "cut at {place}");
        }
        cache.put("key", b"newer").unwrap();
        assert_eq!(cache.get("key").as_deref(), Some(&b"newer"[..]));
    }

    #[test]
    fn where_nothing_can_be_kept_is_said() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let cache = Cache::new(Some(file.path().join("below")));
        assert_eq!(cache.get("key"), None);
        let error = cache.put("key", b"value").unwrap_err().to_string();
        assert!(error.contains("compiled kernels cannot be kept in") && error.contains("below"), "{error}");
        Cache::new(None).put("key", b"value").unwrap();
    }
}

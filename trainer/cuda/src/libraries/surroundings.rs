//! Where NVIDIA's libraries may lie by the environment, in which order these places are searched, and where compiled
//! kernels are kept.
#![allow(unsafe_code)]

use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use super::error::LoadError;
use super::site_packages::{ENVIRONMENTS, site_packages};

/// The variable that names folders, separated by colons, which are searched first.
pub(crate) const FOLDERS: &str = "ELASTIC_CUDA_LIBRARIES";

/// What the environment says about libraries and folders.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Surroundings {
    /// `ELASTIC_CUDA_LIBRARIES`: searched before the loader's own path.
    pub folders: Vec<PathBuf>,
    /// `VIRTUAL_ENV` and `CONDA_PREFIX`: searched after it.
    pub prefixes: Vec<PathBuf>,
    /// Where compiled kernels are kept: the folder `elastic-trainer` in `XDG_CACHE_HOME`, or in `.cache` of `HOME`.
    pub cache: Option<PathBuf>,
}

impl Surroundings {
    /// Reads the variables through `get`.
    pub fn read(get: impl Fn(&str) -> Option<String>) -> Surroundings {
        let folders = get(FOLDERS).unwrap_or_default();
        let path = |name| get(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let cache = path("XDG_CACHE_HOME").or_else(|| path("HOME").map(|home| home.join(".cache")));
        Surroundings {
            folders: folders.split(':').filter(|folder| !folder.is_empty()).map(PathBuf::from).collect(),
            prefixes: ENVIRONMENTS.into_iter().filter_map(path).collect(),
            cache: cache.map(|cache| cache.join("elastic-trainer")),
        }
    }

    /// Where a library may lie, in the order of the search. A bare name leaves the search to the loader.
    fn places(&self, name: &str) -> Vec<PathBuf> {
        let mut places: Vec<PathBuf> = self.folders.iter().map(|folder| folder.join(name)).collect();
        places.push(name.into());
        for prefix in &self.prefixes {
            places.push(prefix.join("lib").join(name));
            for packages in site_packages(prefix) {
                // Wheels of CUDA 13, and of CUDA 12.
                places.push(packages.join("nvidia/cu13/lib").join(name));
                places.push(packages.join("nvidia/cuda_nvrtc/lib").join(name));
                places.push(packages.join("nvidia/cublas/lib").join(name));
            }
        }
        places.push(Path::new("/usr/local/cuda/lib64").join(name));
        places
    }

    /// Loads the first library of this name that exists.
    pub(crate) fn find(&self, name: &str) -> Result<Option<(Library, PathBuf)>, LoadError> {
        for path in self.places(name) {
            let for_the_loader = path.components().count() == 1;
            if !for_the_loader && !path.exists() {
                continue;
            }
            // SAFETY: the driver, NVRTC and cuBLASLt do nothing but set themselves up when they are loaded.
            match unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) } {
                Ok(library) => return Ok(Some((library, path))),
                // The loader's error does not say whether the library is missing or broken.
                Err(_) if for_the_loader => {}
                Err(cause) => return Err(LoadError::Unloadable { path, cause: cause.to_string() }),
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn named_folders_come_first_and_wheels_are_found() {
        let prefix = tempfile::tempdir().unwrap();
        let python = prefix.path().join("lib/python3.11/site-packages");
        fs::create_dir_all(&python).unwrap();
        let root = prefix.path().display().to_string();
        let surroundings = Surroundings::read(|name| match name {
            FOLDERS => Some("/one::/two".to_owned()),
            "VIRTUAL_ENV" => Some(root.clone()),
            "HOME" => Some("/home/someone".to_owned()),
            "CONDA_PREFIX" => Some("not absolute".to_owned()),
            _ => None,
        });
        assert_eq!(surroundings.cache.as_deref(), Some(Path::new("/home/someone/.cache/elastic-trainer")));
        let places = surroundings.places("libnvrtc.so.13");
        let at = |path: &Path| places.iter().position(|place| place == path);
        let (one, two) = (at(Path::new("/one/libnvrtc.so.13")), at(Path::new("/two/libnvrtc.so.13")));
        let (loader, wheel) = (at(Path::new("libnvrtc.so.13")), at(&python.join("nvidia/cu13/lib/libnvrtc.so.13")));
        assert!(one == Some(0) && two == Some(1) && loader == Some(2) && wheel > loader, "{places:?}");
        let wheel = python.join("nvidia/cublas/lib/libcublasLt.so.12");
        assert!(surroundings.places("libcublasLt.so.12").contains(&wheel));
    }
}

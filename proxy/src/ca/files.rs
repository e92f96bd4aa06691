//! The CA's folder: private files that appear whole or not at all.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use thiserror::Error;
use zeroize::Zeroizing;

/// Mode of files with keys.
pub(super) const PRIVATE: u32 = 0o600;
/// Mode of files that others need.
pub(super) const PUBLIC: u32 = 0o644;
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// What is wrong with the folder or a file in it.
#[derive(Debug, Error)]
pub enum FileError {
    /// The system refused.
    #[error("cannot {action} {path}: {error}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// Others may write into the folder or read a key.
    #[error("{path} has mode {mode:o}, which lets others at it; run: chmod go-rwx {path}")]
    Exposed {
        /// What is exposed.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// Another process uses the folder.
    #[error("{0} is in use by another process; a folder belongs to one CA")]
    InUse(PathBuf),
    /// The content is not what was once written there.
    #[error(
        "{path} is damaged: {reason}; it is left as it is: restore it from a backup, or move the folder away to start a new CA"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

impl FileError {
    pub(super) fn damaged(path: &Path, reason: impl ToString) -> Self {
        Self::Damaged {
            path: path.to_path_buf(),
            reason: reason.to_string(),
        }
    }
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
    move |error| FileError::Io {
        action,
        path: path.to_path_buf(),
        error,
    }
}

/// A folder that only its owner can enter, held by this process while the value lives.
pub(super) struct Folder {
    path: PathBuf,
    _lock: Option<File>,
}

impl Folder {
    /// Opens the folder, making it if it is not there; fails if another process holds it.
    pub(super) fn open(path: &Path) -> Result<Self, FileError> {
        Self::open_locked(path, |lock, lock_path| match lock.try_lock() {
            Ok(()) => Ok(()),
            Err(fs::TryLockError::WouldBlock) => Err(FileError::InUse(path.to_path_buf())),
            Err(fs::TryLockError::Error(error)) => Err(io_error("lock", lock_path)(error)),
        })
    }

    /// A folder that another process holds. What is read or written there must be whole at any moment.
    pub(super) fn looked_at(path: &Path) -> Self {
        Self {
            path: path.to_path_buf(),
            _lock: None,
        }
    }

    /// As [`Folder::open`], but waits for another process to let go of it.
    pub(super) fn open_in_turn(path: &Path) -> Result<Self, FileError> {
        Self::open_locked(path, |lock, lock_path| lock.lock().map_err(io_error("lock", lock_path)))
    }

    fn open_locked(path: &Path, take: impl FnOnce(&File, &Path) -> Result<(), FileError>) -> Result<Self, FileError> {
        if !path.exists() {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(path)
                .map_err(io_error("create", path))?;
        }
        let metadata = fs::metadata(path).map_err(io_error("look at", path))?;
        if metadata.mode() & 0o022 != 0 {
            return Err(FileError::Exposed {
                path: path.to_path_buf(),
                mode: metadata.mode() & 0o7777,
            });
        }
        let lock_path = path.join("lock");
        let lock = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(PRIVATE)
            .open(&lock_path)
            .map_err(io_error("create", &lock_path))?;
        take(&lock, &lock_path)?;
        Ok(Self {
            path: path.to_path_buf(),
            _lock: Some(lock),
        })
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Reads a file of public content; none if it does not exist.
    pub(super) fn read(&self, name: &str) -> Result<Option<Vec<u8>>, FileError> {
        Ok(self.read_checked(name, false)?.map(|content| content.to_vec()))
    }

    /// Reads a file that holds a key, and refuses if others could too; none if it does not exist.
    pub(super) fn read_private(&self, name: &str) -> Result<Option<Zeroizing<Vec<u8>>>, FileError> {
        self.read_checked(name, true)
    }

    fn read_checked(&self, name: &str, private: bool) -> Result<Option<Zeroizing<Vec<u8>>>, FileError> {
        let path = self.file(name);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(io_error("open", &path)(e)),
        };
        let mode = file.metadata().map_err(io_error("look at", &path))?.mode();
        if private && mode & 0o077 != 0 {
            return Err(FileError::Exposed {
                path,
                mode: mode & 0o7777,
            });
        }
        let mut content = Zeroizing::new(Vec::with_capacity(8192));
        file.take(MAX_FILE_BYTES)
            .read_to_end(&mut content)
            .map_err(io_error("read", &path))?;
        Ok(Some(content))
    }

    /// Writes a file that must not exist yet.
    pub(super) fn create(&self, name: &str, content: &[u8], mode: u32) -> Result<(), FileError> {
        let path = self.file(name);
        let staged = self.stage(name, content, mode)?;
        // A link, unlike a rename, fails if the name is taken.
        let linked = fs::hard_link(&staged, &path).map_err(io_error("create", &path));
        fs::remove_file(&staged).map_err(io_error("remove", &staged))?;
        linked?;
        self.sync()
    }

    /// Writes a file in the place of whatever has its name.
    pub(super) fn replace(&self, name: &str, content: &[u8], mode: u32) -> Result<(), FileError> {
        let path = self.file(name);
        let staged = self.stage(name, content, mode)?;
        fs::rename(&staged, &path).map_err(io_error("replace", &path))?;
        self.sync()
    }

    /// Removes a file that may not be there.
    pub(super) fn remove(&self, name: &str) -> Result<(), FileError> {
        let path = self.file(name);
        match fs::remove_file(&path) {
            Ok(()) => self.sync(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(io_error("remove", &path)(error)),
        }
    }

    fn stage(&self, name: &str, content: &[u8], mode: u32) -> Result<PathBuf, FileError> {
        let path = self.file(&format!(".{name}.{:016x}", fastrand::u64(..)));
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&path)
            .map_err(io_error("create", &path))?;
        file.write_all(content)
            .and_then(|()| file.set_permissions(Permissions::from_mode(mode)))
            .and_then(|()| file.sync_all())
            .map_err(io_error("write", &path))?;
        Ok(path)
    }

    fn sync(&self) -> Result<(), FileError> {
        File::open(&self.path)
            .and_then(|folder| folder.sync_all())
            .map_err(io_error("sync", &self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn folder_and_files_are_private_and_appear_whole() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("a/ca");
        let folder = Folder::open(&path).unwrap();
        folder.create("key", b"secret", PRIVATE).unwrap();
        folder.create("root", b"public", PUBLIC).unwrap();
        assert_eq!(
            (mode(&path), mode(&folder.file("key")), mode(&folder.file("root"))),
            (0o700, 0o600, 0o644)
        );
        assert!(matches!(
            folder.create("key", b"other", PRIVATE),
            Err(FileError::Io { action: "create", .. })
        ));
        assert_eq!(*folder.read_private("key").unwrap().unwrap(), b"secret");
        folder.replace("key", b"new", PRIVATE).unwrap();
        assert_eq!(*folder.read_private("key").unwrap().unwrap(), b"new");
        let mut names: Vec<_> = fs::read_dir(&path)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["key", "lock", "root"]);
    }

    #[test]
    fn an_exposed_folder_or_key_and_a_second_process_are_refused() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("ca");
        let folder = Folder::open(&path).unwrap();
        assert!(matches!(Folder::open(&path), Err(FileError::InUse(_))));
        folder.create("key", b"secret", 0o640).unwrap();
        assert!(matches!(
            folder.read_private("key"),
            Err(FileError::Exposed { mode: 0o640, .. })
        ));
        drop(folder);
        fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(
            Folder::open(&path),
            Err(FileError::Exposed { mode: 0o777, .. })
        ));
    }
}

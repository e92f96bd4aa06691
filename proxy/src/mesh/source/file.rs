//! One YAML file as the source of truth: read at start, and again whenever it changes.

mod watch;

use std::fs::{self, File, Metadata};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::document;
use super::fault::{Misplaced, SourceError};
use super::{SourceStatus, StatusHandle};
use crate::mesh::{Mesh, MeshHandle};

/// The largest file that is read, in bytes.
pub const MAX_SIZE: u64 = 64 << 20;

/// A mesh file that was read once and can be watched.
#[derive(Debug)]
pub struct FileSource {
    path: PathBuf,
    mesh: MeshHandle,
    status: StatusHandle,
    /// The file as it was last read.
    read: Signature,
    /// The content in force.
    content: u64,
}

impl FileSource {
    /// Reads the mesh of a file.
    pub fn load(path: &Path) -> Result<Mesh, SourceError> {
        Ok(read(path)?.parse(path)?.mesh)
    }

    /// Reads the file, for [`watch`](Self::watch) to follow it from there.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, SourceError> {
        let path = path.into();
        let loaded = read(&path)?.parse(&path)?;
        let mesh = MeshHandle::new(loaded.mesh);
        let status = SourceStatus {
            last_loaded: SystemTime::now(),
            generation: mesh.generation(),
            last_error: None,
            heard: None,
        };
        Ok(Self {
            path,
            mesh,
            status: StatusHandle::new(status),
            read: loaded.signature,
            content: loaded.content,
        })
    }

    /// The mesh as last read.
    pub fn mesh(&self) -> MeshHandle {
        self.mesh.clone()
    }

    /// How the source is doing.
    pub fn status(&self) -> StatusHandle {
        self.status.clone()
    }
}

/// What tells one state of a file from another. The change time is there for writes within one tick of the
/// modification time that are followed by a change of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Signature {
    device: u64,
    inode: u64,
    modified: (i64, i64),
    changed: (i64, i64),
    size: u64,
}

impl Signature {
    /// Of the file that the path leads to now, through all symlinks.
    fn of(path: &Path) -> Result<Self, io::ErrorKind> {
        fs::metadata(path)
            .map(|meta| Self::new(&meta))
            .map_err(|error| error.kind())
    }

    fn new(meta: &Metadata) -> Self {
        Self {
            device: meta.dev(),
            inode: meta.ino(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
            size: meta.size(),
        }
    }
}

struct Content {
    bytes: Vec<u8>,
    signature: Signature,
}

struct Loaded {
    mesh: Mesh,
    signature: Signature,
    content: u64,
}

/// Reads a file of bounded size, in one state.
fn read(path: &Path) -> Result<Content, SourceError> {
    let failed = |error| SourceError::Read {
        path: path.to_owned(),
        error,
    };
    // Asked before opening: to open a pipe would wait for a writer.
    if !fs::metadata(path).map_err(failed)?.is_file() {
        return Err(SourceError::NotAFile { path: path.to_owned() });
    }
    let mut file = File::open(path).map_err(failed)?;
    let signature = Signature::new(&file.metadata().map_err(failed)?);
    let mut bytes = Vec::new();
    (&mut file).take(MAX_SIZE + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MAX_SIZE {
        return Err(SourceError::TooLarge { path: path.to_owned() });
    }
    if Signature::new(&file.metadata().map_err(failed)?) != signature {
        return Err(SourceError::Changing { path: path.to_owned() });
    }
    Ok(Content { bytes, signature })
}

impl Content {
    fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.bytes.hash(&mut hasher);
        hasher.finish()
    }

    fn parse(&self, path: &Path) -> Result<Loaded, SourceError> {
        match document::parse(&self.bytes) {
            Ok(mesh) => Ok(Loaded {
                mesh,
                signature: self.signature,
                content: self.hash(),
            }),
            Err(Misplaced { place, fault }) => Err(SourceError::Invalid {
                path: path.to_owned(),
                place,
                fault,
            }),
        }
    }
}

#[cfg(test)]
mod tests;

//! Files that are read again and again: what they hold, the last good of it where they have turned bad.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use super::root::{Digest, sha256};

/// The largest file that is read.
const MAX_BYTES: u64 = 16 << 20;
/// A file that is rewritten in place may be seen half written: it is taken once it has stayed the same for so long.
const SETTLE: Duration = Duration::from_millis(100);
const SETTLE_TRIES: usize = 10;

/// One file.
#[derive(Debug)]
pub(super) struct Watched<T> {
    what: &'static str,
    path: PathBuf,
    seen: Option<Digest>,
    good: Option<T>,
    error: Option<String>,
    /// A file that is not there, and never was, is nothing to complain about.
    optional: bool,
}

impl<T> Watched<T> {
    pub(super) fn new(what: &'static str, path: &Path, optional: bool) -> Self {
        Self {
            what,
            path: path.to_owned(),
            seen: None,
            good: None,
            error: None,
            optional,
        }
    }

    /// What it holds, or has held when it was last good.
    pub(super) fn good(&self) -> Option<&T> {
        self.good.as_ref()
    }

    /// Why it cannot be used as it is now.
    pub(super) fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Looks at the file; says whether what it holds has changed. Blocks.
    pub(super) fn look(&mut self, parse: impl FnOnce(&[u8]) -> Result<T, String>) -> bool {
        let parsed = match self.read() {
            Ok(None) => return false,
            Ok(Some((digest, bytes))) => {
                self.seen = Some(digest);
                parse(&bytes)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.optional && self.good.is_none() => {
                return false;
            }
            Err(error) => {
                self.seen = None;
                Err(error.to_string())
            }
        };
        match parsed {
            Ok(good) => {
                if self.error.take().is_some() {
                    tracing::info!("{} {} is good again", self.what, self.path.display());
                }
                self.good = Some(good);
                true
            }
            Err(reason) => {
                if self.error.as_ref() != Some(&reason) {
                    let (what, path) = (self.what, self.path.display());
                    if self.good.is_some() {
                        tracing::error!("{what} {path} cannot be used: {reason}; what it held before stays in force");
                    } else {
                        tracing::error!(
                            "{what} {path} cannot be used: {reason}; it gives nothing until that is mended"
                        );
                    }
                    self.error = Some(reason);
                }
                false
            }
        }
    }

    /// The contents, if they have changed and are whole.
    fn read(&self) -> io::Result<Option<(Digest, Vec<u8>)>> {
        let mut bytes = read_bounded(&self.path)?;
        let mut digest = sha256(&bytes);
        if self.seen == Some(digest) {
            return Ok(None);
        }
        for _ in 0..SETTLE_TRIES {
            if self.seen.is_some() || self.good.is_some() {
                sleep(SETTLE);
            }
            let again = read_bounded(&self.path)?;
            let same = again == bytes;
            bytes = again;
            if same {
                break;
            }
            digest = sha256(&bytes);
        }
        Ok(Some((digest, bytes)))
    }
}

/// A file, or a folder of files. A file that goes from the folder goes from here.
#[derive(Debug)]
pub(super) struct WatchedFolder<T> {
    what: &'static str,
    path: PathBuf,
    files: BTreeMap<PathBuf, Watched<T>>,
    error: Option<String>,
}

impl<T> WatchedFolder<T> {
    pub(super) fn new(what: &'static str, path: &Path) -> Self {
        Self {
            what,
            path: path.to_owned(),
            files: BTreeMap::new(),
            error: None,
        }
    }

    pub(super) fn good(&self) -> impl Iterator<Item = &T> {
        self.files.values().filter_map(Watched::good)
    }

    pub(super) fn errors(&self) -> impl Iterator<Item = (&Path, &str)> {
        let own = self.error.as_deref().map(|error| (&*self.path, error));
        let files = self
            .files
            .values()
            .filter_map(|file| Some((file.path(), file.error()?)));
        own.into_iter().chain(files)
    }

    pub(super) fn look(&mut self, parse: impl Fn(&[u8]) -> Result<T, String>) -> bool {
        let names = match names(&self.path) {
            Ok(names) => names,
            Err(error) => {
                let reason = error.to_string();
                if self.error.as_ref() != Some(&reason) {
                    tracing::error!(
                        "{} {}: {reason}; what was there before stays in force",
                        self.what,
                        self.path.display()
                    );
                    self.error = Some(reason);
                }
                return false;
            }
        };
        self.error = None;
        let before = self.files.len();
        self.files.retain(|path, _| names.contains(path));
        let mut changed = self.files.len() != before;
        for name in names {
            let file = self
                .files
                .entry(name.clone())
                .or_insert_with(|| Watched::new(self.what, &name, false));
            changed |= file.look(&parse);
        }
        changed
    }
}

fn names(path: &Path) -> io::Result<Vec<PathBuf>> {
    if !path.metadata()?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut names = Vec::new();
    for entry in path.read_dir()? {
        let entry = entry?;
        // What a mounted ConfigMap or Secret keeps for itself begins with a dot.
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if !hidden && entry.path().is_file() {
            names.push(entry.path());
        }
    }
    names.sort();
    Ok(names)
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(io::Error::other(format!("it has more than {MAX_BYTES} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    fn parse(bytes: &[u8]) -> Result<String, String> {
        let text = String::from_utf8_lossy(bytes).into_owned();
        if text.contains("bad") { Err(text) } else { Ok(text) }
    }

    #[test]
    fn a_file_is_noticed_when_rewritten_and_when_swapped_and_a_bad_one_keeps_what_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bundle.pem");
        let mut file = Watched::new("the file", &path, false);
        assert!(!file.look(parse));
        assert!(file.good().is_none() && file.error().is_some());
        fs::write(&path, "one").unwrap();
        assert!(file.look(parse) && !file.look(parse));
        assert!(file.error().is_none());
        fs::write(&path, "two").unwrap();
        assert!(file.look(parse));
        // As kubelets do it: a link to a folder is replaced.
        for (version, text) in [("v1", "three"), ("v2", "bad"), ("v3", "four")] {
            fs::create_dir(folder.path().join(version)).unwrap();
            fs::write(folder.path().join(version).join("bundle.pem"), text).unwrap();
        }
        fs::remove_file(&path).unwrap();
        symlink("..data/bundle.pem", &path).unwrap();
        let swap = |to: &str| {
            symlink(to, folder.path().join("..tmp")).unwrap();
            fs::rename(folder.path().join("..tmp"), folder.path().join("..data")).unwrap();
        };
        swap("v1");
        assert!(file.look(parse));
        swap("v2");
        assert!(!file.look(parse));
        assert_eq!(
            (file.good().map(String::as_str), file.error()),
            (Some("three"), Some("bad"))
        );
        fs::remove_file(&path).unwrap();
        assert!(!file.look(parse));
        assert_eq!(file.good().map(String::as_str), Some("three"));
        fs::write(&path, "three").unwrap();
        assert!(file.look(parse));
        assert!(file.error().is_none());
    }

    #[test]
    fn an_optional_file_that_never_was_is_no_fault() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("list");
        let mut file = Watched::new("the file", &path, true);
        assert!(!file.look(parse) && file.error().is_none());
        fs::write(&path, "one").unwrap();
        assert!(file.look(parse));
        fs::remove_file(&path).unwrap();
        assert!(!file.look(parse));
        assert!(file.error().is_some() && file.good().is_some());
    }

    #[test]
    fn a_folder_has_what_its_files_have_each_for_itself() {
        let folder = tempfile::tempdir().unwrap();
        let mut watched = WatchedFolder::new("the lists", folder.path());
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        let all = |watched: &WatchedFolder<String>| watched.good().cloned().collect::<Vec<_>>().join(" ");
        assert!(!watched.look(parse));
        write("a", "one");
        write("b", "two");
        write(".hidden", "bad");
        assert!(watched.look(parse) && !watched.look(parse));
        assert_eq!(all(&watched), "one two");
        write("a", "bad");
        write("b", "three");
        assert!(watched.look(parse));
        assert_eq!((all(&watched).as_str(), watched.errors().count()), ("one three", 1));
        fs::remove_file(folder.path().join("a")).unwrap();
        assert!(watched.look(parse));
        assert_eq!((all(&watched).as_str(), watched.errors().count()), ("three", 0));
    }
}

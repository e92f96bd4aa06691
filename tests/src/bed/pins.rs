//! What the proxies of a bed pin in the bpffs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Where the proxies have their bpffs.
const BPFFS: &str = "/sys/fs/bpf";

/// The folder for the pins of each proxy of a bed, all removed when dropped.
#[derive(Debug)]
pub(super) struct PinFolders {
    prefix: String,
}

impl PinFolders {
    /// Those of the bed with this prefix.
    pub(super) fn new(prefix: &str) -> Self {
        Self {
            prefix: prefix.to_owned(),
        }
    }

    /// The folder of a node, which its proxy makes.
    pub(super) fn of(&self, node: &str) -> PathBuf {
        Path::new(BPFFS).join(format!("{}-{node}", self.prefix))
    }
}

impl Drop for PinFolders {
    fn drop(&mut self) {
        let own = format!("{}-", self.prefix);
        remove(|name| name.starts_with(&own));
    }
}

/// The names of all pins at the top of the bpffs.
pub(super) fn list() -> Vec<String> {
    super::sweep::folder_names(Path::new(BPFFS))
}

/// Removes the pins of those names.
pub(super) fn remove(wanted: impl Fn(&str) -> bool) {
    for name in list().into_iter().filter(|name| wanted(name)) {
        if let Err(error) = remove_tree(&Path::new(BPFFS).join(&name)) {
            eprintln!("cannot remove the pins {name}: {error}");
        }
    }
}

fn remove_tree(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    fs::remove_dir(folder)
}

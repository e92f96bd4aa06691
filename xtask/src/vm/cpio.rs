//! The archive that the kernel unpacks as its first file system: cpio in the format `newc`, written here because the
//! owner of every file must be root whoever builds it. Format: `Documentation/driver-api/early-userspace/buffer-format.rst`
//! in the kernel's sources.

use std::{collections::BTreeSet, path::Path};

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;
const CONSOLE: u32 = 0o020_600;

/// An archive under construction.
#[derive(Clone, Debug, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    names: BTreeSet<String>,
}

impl Archive {
    /// Adds a folder and those above it.
    pub(crate) fn folder(&mut self, path: &str) {
        let mut name = String::new();
        for part in path.split('/').filter(|part| !part.is_empty()) {
            if !name.is_empty() {
                name.push('/');
            }
            name.push_str(part);
            self.entry(&name, FOLDER, (0, 0), &[]);
        }
    }

    /// Adds an executable file and the folders above it; a path that is there already stays as it is.
    pub(crate) fn file(&mut self, path: &str, contents: &[u8]) {
        self.above(path);
        self.entry(path.trim_start_matches('/'), PROGRAM, (0, 0), contents);
    }

    /// Adds a symbolic link and the folders above it.
    pub(crate) fn link(&mut self, path: &str, target: &str) {
        self.above(path);
        self.entry(path.trim_start_matches('/'), LINK, (0, 0), target.as_bytes());
    }

    /// Adds `/dev/console`, without which the first process has no output.
    pub(crate) fn console(&mut self) {
        self.folder("dev");
        self.entry("dev/console", CONSOLE, (5, 1), &[]);
    }

    /// The finished archive.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.write("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn above(&mut self, path: &str) {
        if let Some(parent) = Path::new(path).parent().and_then(Path::to_str) {
            self.folder(parent);
        }
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), contents: &[u8]) {
        if self.names.insert(name.to_owned()) {
            self.write(name, mode, device, contents);
        }
    }

    fn write(&mut self, name: &str, mode: u32, (major, minor): (u32, u32), contents: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(contents.len()).expect("no file of 4 GiB goes into a machine");
        let name_size = u32::try_from(name.len() + 1).expect("names are short");
        // inode, mode, uid, gid, links, mtime, size, device, special device, name size, checksum (unused).
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, major, minor, name_size, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(contents);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names, modes and contents, read back.
    fn entries(bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut list = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            assert_eq!(&bytes[at..at + 6], b"070701");
            let field = |index: usize| {
                let start = at + 6 + 8 * index;
                u32::from_str_radix(std::str::from_utf8(&bytes[start..start + 8]).unwrap(), 16).unwrap()
            };
            let (mode, size, name_size) = (field(1), field(6) as usize, field(11) as usize);
            let name = String::from_utf8(bytes[at + 110..at + 110 + name_size - 1].to_vec()).unwrap();
            let start = (at + 110 + name_size).next_multiple_of(4);
            list.push((name, mode, bytes[start..start + size].to_vec()));
            at = (start + size).next_multiple_of(4);
        }
        list
    }

    #[test]
    fn folders_come_before_what_they_hold_and_only_once() {
        let mut archive = Archive::default();
        archive.file("/usr/bin/a", b"first");
        archive.file("/usr/bin/a", b"again");
        archive.link("/usr/bin/b", "a");
        let entries = entries(&archive.finish());
        let names: Vec<_> = entries.iter().map(|(name, ..)| name.as_str()).collect();
        assert_eq!(names, ["usr", "usr/bin", "usr/bin/a", "usr/bin/b", "TRAILER!!!"]);
        assert_eq!(entries[2], ("usr/bin/a".to_owned(), PROGRAM, b"first".to_vec()));
        assert_eq!(entries[3], ("usr/bin/b".to_owned(), LINK, b"a".to_vec()));
    }
}

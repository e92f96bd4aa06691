//! Container images without a container tool: the archive that `docker save` writes and that `ctr images import`,
//! `docker load`, `podman load` and `skopeo` read. The same contents give the same bytes, wherever and whenever.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType, Header};

/// What an image holds and how it is run.
#[derive(Clone, Debug, Default)]
pub struct Image {
    /// The name it goes by, such as `localhost/adit:1.0.0`.
    pub tag: String,
    /// Files, folders and links. The folders above them are made.
    pub entries: Vec<Entry>,
    /// The command that a container runs.
    pub entrypoint: Vec<String>,
    /// The environment, as `NAME=value`.
    pub environment: Vec<String>,
    /// `org.opencontainers.image.…` and others.
    pub labels: BTreeMap<String, String>,
    /// When it was made, as in RFC 3339: of the source, not of the build.
    pub created: Option<String>,
}

/// One path of an image. Everything belongs to root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    path: String,
    mode: u32,
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    File(Vec<u8>),
    Folder,
    Link(String),
}

impl Entry {
    /// A file that may be run.
    pub fn program(path: &str, contents: Vec<u8>) -> Self {
        Self::new(path, 0o755, Kind::File(contents))
    }

    /// A file that everybody may read.
    pub fn file(path: &str, contents: impl Into<Vec<u8>>) -> Self {
        Self::new(path, 0o644, Kind::File(contents.into()))
    }

    /// A folder with these permissions, such as `0o1777` for `/tmp`.
    pub fn folder(path: &str, mode: u32) -> Self {
        Self::new(path, mode, Kind::Folder)
    }

    /// A symbolic link.
    pub fn link(path: &str, target: &str) -> Self {
        Self::new(path, 0o777, Kind::Link(target.to_owned()))
    }

    fn new(path: &str, mode: u32, kind: Kind) -> Self {
        let path = path.trim_matches('/').to_owned();
        Self { path, mode, kind }
    }
}

/// Writes an image with one layer as a docker-archive.
pub fn write_archive(path: &Path, image: &Image) -> Result<()> {
    let bytes = archive(image).with_context(|| format!("making the image {}", image.tag))?;
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    }
    // By another name first: whoever waits for the file never sees half of it.
    let unfinished = path.with_extension("unfinished");
    fs::write(&unfinished, bytes).with_context(|| format!("writing {}", unfinished.display()))?;
    fs::rename(&unfinished, path).with_context(|| format!("naming {}", path.display()))
}

fn archive(image: &Image) -> Result<Vec<u8>> {
    let layer = layer(&image.entries)?;
    let config = serde_json::to_vec(&config(image, &layer))?;
    let manifest = json!([{ "Config": "config.json", "RepoTags": [image.tag], "Layers": ["layer.tar"] }]);
    let mut archive = Builder::new(Vec::with_capacity(layer.len() + (64 << 10)));
    for (name, contents) in [
        ("manifest.json", serde_json::to_vec(&manifest)?),
        ("config.json", config),
        ("layer.tar", layer),
    ] {
        let file = Entry::file(name, contents);
        append(&mut archive, &file)?;
    }
    Ok(archive.into_inner()?)
}

/// The image's file system: sorted, so that the order in which things were found does not show.
fn layer(entries: &[Entry]) -> Result<Vec<u8>> {
    let mut sorted: Vec<Entry> = entries.to_vec();
    let known: BTreeSet<&str> = entries.iter().map(|entry| entry.path.as_str()).collect();
    ensure!(known.len() == entries.len(), "a path is given twice");
    let above = entries
        .iter()
        .flat_map(|entry| Path::new(&entry.path).ancestors().skip(1));
    let above: BTreeSet<&str> = above.filter_map(Path::to_str).filter(|path| !path.is_empty()).collect();
    sorted.extend(above.difference(&known).map(|path| Entry::folder(path, 0o755)));
    sorted.sort_by(|a, b| a.path.cmp(&b.path));
    let mut layer = Builder::new(Vec::new());
    for entry in &sorted {
        append(&mut layer, entry)?;
    }
    Ok(layer.into_inner()?)
}

fn append(archive: &mut Builder<Vec<u8>>, entry: &Entry) -> Result<()> {
    let mut header = Header::new_gnu();
    header.set_mode(entry.mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    let at = || format!("adding {}", entry.path);
    match &entry.kind {
        Kind::File(contents) => {
            header.set_entry_type(EntryType::Regular);
            header.set_size(contents.len() as u64);
            archive.append_data(&mut header, &entry.path, contents.as_slice())
        }
        Kind::Folder => {
            header.set_entry_type(EntryType::Directory);
            header.set_size(0);
            archive.append_data(&mut header, format!("{}/", entry.path), std::io::empty())
        }
        Kind::Link(target) => {
            header.set_entry_type(EntryType::Symlink);
            header.set_size(0);
            archive.append_link(&mut header, &entry.path, target)
        }
    }
    .with_context(at)
}

/// The image's configuration, as the OCI image specification has it.
fn config(image: &Image, layer: &[u8]) -> Value {
    let mut config = json!({
        "architecture": architecture(std::env::consts::ARCH),
        "os": "linux",
        "config": {
            "Entrypoint": image.entrypoint,
            "Env": image.environment,
            "Labels": image.labels,
            "WorkingDir": "/",
        },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", sha256(layer))] },
    });
    if let Some(created) = &image.created {
        config["created"] = json!(created);
        config["history"] = json!([{ "created": created, "created_by": "cargo xtask image" }]);
    }
    config
}

/// What images call the processor that Rust calls `arch`.
fn architecture(arch: &str) -> &str {
    match arch {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// A SHA-256 sum in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;

    fn image(entries: Vec<Entry>) -> Image {
        Image {
            tag: "localhost/thing:1".to_owned(),
            entries,
            entrypoint: vec!["/thing".to_owned()],
            ..Image::default()
        }
    }

    /// Names, permissions and contents of an archive's files.
    fn read(bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut archive = tar::Archive::new(bytes);
        let entries = archive.entries().unwrap().map(|entry| {
            let mut entry = entry.unwrap();
            assert_eq!(entry.header().mtime().unwrap(), 0);
            assert_eq!((entry.header().uid().unwrap(), entry.header().gid().unwrap()), (0, 0));
            let (path, mode) = (
                entry.path().unwrap().display().to_string(),
                entry.header().mode().unwrap(),
            );
            let mut contents = Vec::new();
            entry.read_to_end(&mut contents).unwrap();
            (path, mode, contents)
        });
        entries.collect()
    }

    #[test]
    fn the_order_in_which_things_are_given_does_not_show() {
        let (a, b) = (Entry::program("/bin/a", vec![1]), Entry::link("/bin/b", "a"));
        assert_eq!(
            archive(&image(vec![a.clone(), b.clone()])).unwrap(),
            archive(&image(vec![b, a])).unwrap()
        );
    }

    #[test]
    fn the_configuration_names_the_layer_by_its_sum() {
        let files = read(&archive(&image(vec![Entry::program("/thing", b"x".to_vec())])).unwrap());
        let names: Vec<&str> = files.iter().map(|(name, ..)| name.as_str()).collect();
        assert_eq!(names, ["manifest.json", "config.json", "layer.tar"]);
        let config: Value = serde_json::from_slice(&files[1].2).unwrap();
        assert_eq!(
            config["rootfs"]["diff_ids"][0],
            format!("sha256:{}", sha256(&files[2].2))
        );
        assert_eq!(config["config"]["Entrypoint"], json!(["/thing"]));
        let manifest: Value = serde_json::from_slice(&files[0].2).unwrap();
        assert_eq!(manifest[0]["RepoTags"], json!(["localhost/thing:1"]));
    }

    #[test]
    fn folders_come_before_what_they_hold() {
        let entries = [
            Entry::file("/etc/x/y.conf", "y"),
            Entry::folder("/tmp", 0o1777),
            Entry::program("/adit", Vec::new()),
        ];
        let listed: Vec<_> = read(&layer(&entries).unwrap())
            .into_iter()
            .map(|(name, mode, _)| (name, mode))
            .collect();
        let expected = [
            ("adit", 0o755),
            ("etc/", 0o755),
            ("etc/x/", 0o755),
            ("etc/x/y.conf", 0o644),
            ("tmp/", 0o1777),
        ];
        assert_eq!(listed, expected.map(|(name, mode)| (name.to_owned(), mode)));
    }

    #[test]
    fn a_path_given_twice_is_refused() {
        let twice = [Entry::file("/a", "1"), Entry::file("a", "2")];
        assert!(layer(&twice).unwrap_err().to_string().contains("twice"));
    }
}

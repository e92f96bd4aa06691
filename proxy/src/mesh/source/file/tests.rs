use std::os::unix::fs::{PermissionsExt, symlink};
use std::time::Duration;

use tempfile::TempDir;

use super::*;
use crate::mesh::MeshError;
use crate::mesh::source::Fault;

const POLL: Duration = Duration::from_millis(20);
const SETTLE: Duration = Duration::from_millis(10);

fn text(workloads: &[&str]) -> String {
    let mut text = "trustDomain: cluster.local\nworkloads:\n".to_owned();
    for name in workloads {
        text.push_str(&format!(
            "  - {{name: {name}, namespace: shop, serviceAccount: {name}}}\n"
        ));
    }
    text
}

struct Watched {
    dir: TempDir,
    path: PathBuf,
    mesh: MeshHandle,
    status: StatusHandle,
    task: tokio::task::JoinHandle<()>,
}

impl Watched {
    fn start(dir: TempDir, path: PathBuf, settle: Duration) -> Self {
        let source = FileSource::open(&path).unwrap();
        Self {
            dir,
            path,
            mesh: source.mesh(),
            status: source.status(),
            task: tokio::spawn(source.watch_every(POLL, settle)),
        }
    }

    fn plain() -> Self {
        Self::settling(SETTLE)
    }

    fn settling(settle: Duration) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mesh.yaml");
        fs::write(&path, text(&["one"])).unwrap();
        Self::start(dir, path, settle)
    }

    fn replace(&self, content: impl AsRef<[u8]>) {
        let next = self.dir.path().join("next");
        fs::write(&next, content).unwrap();
        fs::rename(next, &self.path).unwrap();
    }

    fn has(&self, name: &str) -> bool {
        self.mesh.load().workload_by_uid(&format!("shop/{name}")).is_some()
    }

    async fn until(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        for _ in 0..500 {
            if condition(self) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("not within 5 s: {what}; {:?}", self.status.load());
    }

    async fn until_error(&self, part: &str) {
        let has_error = |watched: &Self| {
            watched
                .status
                .load()
                .last_error
                .is_some_and(|error| error.contains(part))
        };
        self.until(part, has_error).await;
    }

    async fn until_loaded(&self, name: &str) {
        self.until(name, |watched| {
            watched.has(name) && watched.status.load().last_error.is_none()
        })
        .await;
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[tokio::test]
async fn a_file_replaced_by_rename_is_loaded() {
    let watched = Watched::plain();
    let mut generations = watched.mesh.subscribe();
    watched.replace(text(&["two"]));
    watched.until_loaded("two").await;
    assert!(!watched.has("one"));
    assert!(generations.has_changed().unwrap());
    assert_eq!(
        (*generations.borrow_and_update(), watched.status.load().generation),
        (2, 2)
    );
}

#[tokio::test]
async fn a_file_written_in_place_is_loaded() {
    let watched = Watched::plain();
    fs::write(&watched.path, text(&["two"])).unwrap();
    watched.until_loaded("two").await;
}

#[tokio::test]
async fn a_swapped_symlink_on_the_way_is_followed() {
    // As Kubernetes mounts a ConfigMap: mesh.yaml -> ..data/mesh.yaml, ..data -> a folder.
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().to_owned();
    for (folder, workload) in [("v1", "one"), ("v2", "two")] {
        fs::create_dir(root.join(folder)).unwrap();
        fs::write(root.join(folder).join("mesh.yaml"), text(&[workload])).unwrap();
    }
    symlink("v1", root.join("..data")).unwrap();
    symlink("..data/mesh.yaml", root.join("mesh.yaml")).unwrap();
    let watched = Watched::start(dir, root.join("mesh.yaml"), SETTLE);
    symlink("v2", root.join("..next")).unwrap();
    fs::rename(root.join("..next"), root.join("..data")).unwrap();
    fs::remove_dir_all(root.join("v1")).unwrap();
    watched.until_loaded("two").await;
}

#[tokio::test]
async fn a_missing_file_keeps_the_state_and_is_taken_up_again() {
    let watched = Watched::plain();
    fs::remove_file(&watched.path).unwrap();
    watched.until_error("cannot read").await;
    assert!(watched.has("one"));
    watched.replace(text(&["one"]));
    watched
        .until("same content again", |w| w.status.load().last_error.is_none())
        .await;
    assert_eq!(watched.mesh.generation(), 1);
    fs::remove_file(&watched.path).unwrap();
    watched.until_error("cannot read").await;
    watched.replace(text(&["two"]));
    watched.until_loaded("two").await;
}

#[tokio::test]
async fn a_broken_file_keeps_the_state_and_tells_line_and_reason() {
    let watched = Watched::plain();
    watched.replace(format!(
        "{}  - {{name: two, namespace: shop, serviceAccount: [}}\n",
        text(&["one"])
    ));
    watched.until_error("mesh.yaml:4:").await;
    assert!(watched.has("one") && watched.mesh.generation() == 1);
    let first = watched.status.load();
    watched.replace(text(&["one", "one"]));
    watched.until_error("two workloads have the uid shop/one").await;
    assert_eq!(watched.status.load().last_loaded, first.last_loaded);
    watched.replace(b"\xff\xfe");
    watched.until_error(":1:1: not UTF-8").await;
    assert!(watched.has("one") && watched.mesh.generation() == 1);
    watched.replace(text(&["two"]));
    watched.until_loaded("two").await;
}

#[tokio::test]
async fn broken_content_that_comes_back_shows_its_reason_again() {
    let watched = Watched::plain();
    let broken = "trustDomain: cluster.local\nnodes: [{}]\n";
    watched.replace(broken);
    watched.until_error("mesh.yaml:2:").await;
    fs::remove_file(&watched.path).unwrap();
    watched.until_error("cannot read").await;
    watched.replace(broken);
    watched.until_error("mesh.yaml:2:").await;
    watched.replace(text(&["one"]));
    watched
        .until("the state in force again", |w| w.status.load().last_error.is_none())
        .await;
    assert_eq!(watched.mesh.generation(), 1);
}

#[tokio::test]
async fn a_file_that_is_being_written_is_not_read_half() {
    use std::io::Write;
    let watched = Watched::settling(Duration::from_millis(300));
    let names: Vec<String> = (0..100).map(|n| format!("w{n}")).collect();
    let content = text(&names.iter().map(String::as_str).collect::<Vec<_>>());
    let mut file = File::create(&watched.path).unwrap();
    // Each cut is after a line: a prefix would be a valid mesh with fewer workloads.
    for line in content.split_inclusive('\n') {
        file.write_all(line.as_bytes()).unwrap();
        tokio::time::sleep(Duration::from_millis(2)).await;
        let workloads = watched.mesh.load().workloads().count();
        assert!(workloads == 1 || workloads == 100, "{workloads}");
    }
    watched.until_loaded("w99").await;
    assert_eq!(watched.mesh.load().workloads().count(), 100);
}

#[tokio::test]
async fn what_is_no_regular_file_keeps_the_state() {
    let watched = Watched::plain();
    fs::remove_file(&watched.path).unwrap();
    fs::create_dir(&watched.path).unwrap();
    watched.until_error("not a regular file").await;
    fs::remove_dir(&watched.path).unwrap();
    nix::unistd::mkfifo(&watched.path, nix::sys::stat::Mode::S_IRUSR).unwrap();
    watched.until_error("not a regular file").await;
    fs::remove_file(&watched.path).unwrap();
    fs::write(&watched.path, text(&["two"])).unwrap();
    watched.until_loaded("two").await;
}

#[test]
fn errors_can_be_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mesh.yaml");
    assert!(matches!(FileSource::load(&path), Err(SourceError::Read { .. })));
    assert!(matches!(
        FileSource::load(dir.path()),
        Err(SourceError::NotAFile { .. })
    ));
    fs::write(&path, text(&["one", "one"])).unwrap();
    let error = FileSource::load(&path).unwrap_err();
    assert!(matches!(
        &error,
        SourceError::Invalid {
            fault: Fault::Mesh(MeshError::DuplicateUid { .. }),
            ..
        }
    ));
    assert_eq!(
        error.to_string(),
        format!("{}:4:5: two workloads have the uid shop/one", path.display())
    );
    let file = File::create(&path).unwrap();
    file.set_len(MAX_SIZE + 1).unwrap();
    file.set_permissions(fs::Permissions::from_mode(0o600)).unwrap();
    assert!(matches!(FileSource::load(&path), Err(SourceError::TooLarge { .. })));
}

#[test]
fn a_large_mesh_is_loaded() {
    let names: Vec<String> = (0..100_000).map(|n| format!("w{n}")).collect();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mesh.yaml");
    fs::write(&path, text(&names.iter().map(String::as_str).collect::<Vec<_>>())).unwrap();
    assert_eq!(FileSource::load(&path).unwrap().workloads().count(), 100_000);
}

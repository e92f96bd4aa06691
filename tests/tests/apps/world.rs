//! The world in which the applications run, and words that their stories share.

use std::fs::{self, Permissions};
use std::io::Read;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use adit_tests::bed::{AccessLine, Bed, BedBuilder, Pod, PodSpec};
use anyhow::{Context, ensure};
use nix::unistd::{User, chown};
use sha2::{Digest, Sha256};

/// How long to wait for what should happen at once.
pub(crate) const SOON: Duration = Duration::from_secs(5);

/// How long an application may take to start, or for a longer piece of work.
pub(crate) const LONG: Duration = Duration::from_secs(30);

/// Two nodes. On n1 the pods `client` and `stranger`, on n2 `server`, each with an account of its own.
pub(crate) fn world(name: &str) -> BedBuilder {
    Bed::builder(name)
        .node("n1")
        .node("n2")
        .pod("n1", PodSpec::new("client").account("apps/client"))
        .pod("n1", PodSpec::new("stranger").account("apps/stranger"))
        .pod("n2", PodSpec::new("server").account("apps/server"))
}

/// Makes a folder for an application's files in the bed's own, which it can reach as the user it runs as.
pub(crate) fn folder(bed: &Bed, name: &str, user: &str) -> anyhow::Result<PathBuf> {
    fs::set_permissions(bed.dir(), Permissions::from_mode(0o711)).context("open the bed's folder to other users")?;
    let path = bed.dir().join(name);
    fs::create_dir(&path).with_context(|| format!("make {}", path.display()))?;
    fs::set_permissions(&path, Permissions::from_mode(0o755))?;
    let user = User::from_name(user)?.with_context(|| format!("no user {user} on this machine"))?;
    chown(&path, Some(user.uid), Some(user.gid))
        .with_context(|| format!("give {} to {}", path.display(), user.name))?;
    Ok(path)
}

/// The path as text for a command line or a configuration file.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("a path of the bed is text")
}

/// Runs a command of the machine's to its end and gives its standard output; an error if it fails.
pub(crate) fn tool(program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("start {program}"))?;
    ensure!(
        output.status.success(),
        "{program} {arguments:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a command to its end and gives number and SHA-256 of the bytes of its standard output; an error if it fails.
pub(crate) fn digest_of_output(command: &mut Command) -> anyhow::Result<(u64, String)> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {command:?}"))?;
    let mut stdout = child.stdout.take().context("the command's standard output")?;
    let digest = digest(&mut stdout);
    let output = child.wait_with_output()?;
    ensure!(
        output.status.success(),
        "{command:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    digest
}

/// The number and SHA-256 of the bytes to the end.
pub(crate) fn digest(from: &mut impl Read) -> anyhow::Result<(u64, String)> {
    let mut hash = Sha256::new();
    let mut bytes = 0;
    let mut buffer = vec![0; 256 << 10];
    loop {
        let count = from.read(&mut buffer).context("read what is to be hashed")?;
        if count == 0 {
            let hex = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
            return Ok((bytes, hex));
        }
        hash.update(&buffer[..count]);
        bytes += count as u64;
    }
}

/// Makes a file of so many mebibytes of noise that everybody may read, and gives its size and SHA-256.
pub(crate) fn noise_file(path: &Path, mebibytes: u64) -> anyhow::Result<(u64, String)> {
    let mut random = fs::File::open("/dev/urandom")?.take(mebibytes << 20);
    let mut file = fs::File::create(path).with_context(|| format!("make {}", path.display()))?;
    std::io::copy(&mut random, &mut file)?;
    fs::set_permissions(path, Permissions::from_mode(0o644))?;
    digest(&mut fs::File::open(path)?)
}

/// The client's connections to `to` went through the tunnel under both pods' identities, as both nodes tell; gives the
/// line of the server's node.
pub(crate) fn assert_tunnelled(bed: &Bed, client: &Pod, server: &Pod, to: SocketAddr) -> AccessLine {
    let (destination, source_ip) = (to.to_string(), format!("{}:", client.v4()));
    let of_this = |line: &AccessLine, reporter: &str| {
        line.has(&[("reporter", reporter), ("destination.addr", &destination)])
            && line.get("source.addr").starts_with(&source_ip)
    };
    let line_of = |node: &str, reporter: &str| {
        let what = format!("reporter={reporter} from {} to {destination}", client.v4());
        let line = bed
            .node(node)
            .wait_for_access(&what, SOON, |line| of_this(line, reporter));
        let line = line.unwrap();
        assert_eq!(line.get("path"), "hbone", "{line:?}");
        assert_eq!(line.get("source.identity"), client.identity(), "{line:?}");
        assert_eq!(line.get("destination.identity"), server.identity(), "{line:?}");
        line
    };
    line_of(client.node(), "source");
    let line = line_of(server.node(), "destination");
    let plain = |line: &AccessLine| line.get("destination.addr") == destination && line.get("path") == "plain";
    for node in bed.nodes() {
        assert!(
            !node.access_log().iter().any(plain),
            "a connection in plaintext at {}",
            node.name()
        );
    }
    line
}

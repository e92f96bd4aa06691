//! OpenSSH, whose server speaks first.

use std::fs;
use std::path::{Path, PathBuf};

use adit_tests::bed::{Bed, Pod, Spawned};

use crate::world::{LONG, assert_tunnelled, digest, digest_of_output, folder, noise_file, text, tool, world};

/// Its standard port.
const PORT: u16 = 22;

/// Debian's configuration, with keys of this test's.
fn start(bed: &Bed, dir: &Path) -> anyhow::Result<Spawned> {
    let server = bed.pod("server");
    for name in ["host", "user"] {
        tool(
            "ssh-keygen",
            &["-q", "-t", "ed25519", "-N", "", "-f", text(&dir.join(name))],
        )?;
    }
    let host_key = fs::read_to_string(dir.join("host.pub"))?;
    fs::write(dir.join("known_hosts"), format!("{} {host_key}", server.v4()))?;
    fs::copy(dir.join("user.pub"), dir.join("authorized_keys"))?;
    let dir = text(dir);
    // The keys lie below /tmp, which others may write to, so their place cannot pass the strict check of modes. The
    // folder /run/sshd is what the service manager would make.
    let script = format!(
        "mount -t tmpfs tmpfs /run && mkdir -m 755 /run/sshd && exec /usr/sbin/sshd -D -e -h {dir}/host \
         -o PidFile={dir}/sshd.pid -o AuthorizedKeysFile={dir}/authorized_keys -o StrictModes=no"
    );
    let sshd = server.spawn_command("unshare", &["--mount", "sh", "-c", &script])?;
    server.wait_for_listener(PORT, LONG)?;
    Ok(sshd)
}

/// What the client's programs are told; nothing of the user's own.
fn options(dir: &Path) -> Vec<String> {
    let dir = text(dir);
    let option = |setting: String| ["-o".to_owned(), setting];
    let mut all = vec!["-i".to_owned(), format!("{dir}/user")];
    all.extend(option("BatchMode=yes".to_owned()));
    all.extend(option("IdentitiesOnly=yes".to_owned()));
    all.extend(option("StrictHostKeyChecking=yes".to_owned()));
    all.extend(option(format!("UserKnownHostsFile={dir}/known_hosts")));
    all
}

fn ssh(client: &Pod, dir: &Path, server: &Pod, remote: &str) -> std::process::Command {
    let mut command = client.command("ssh");
    command
        .args(options(dir))
        .arg(format!("root@{}", server.v4()))
        .arg(remote);
    command
}

fn scp(client: &Pod, dir: &Path, from: &str, to: &str) -> anyhow::Result<()> {
    let options = options(dir);
    let mut arguments: Vec<&str> = options.iter().map(String::as_str).collect();
    arguments.extend(["-q", from, to]);
    client.output("scp", &arguments).map(drop)
}

#[test]
fn ssh_runs_a_command_copies_files_and_knows_both_addresses() {
    let bed = world("openssh").start().unwrap();
    let (client, server) = (bed.pod("client"), bed.pod("server"));
    let dir = folder(&bed, "openssh", "root").unwrap();
    let _sshd = start(&bed, &dir).unwrap();

    let output = ssh(client, &dir, server, "echo $SSH_CONNECTION; exit 7")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(7), "the command's own status: {output:?}");
    let connection = String::from_utf8_lossy(&output.stdout).into_owned();
    let fields: Vec<&str> = connection.split_whitespace().collect();
    let [from, port, to, own_port] = fields[..] else {
        panic!("SSH_CONNECTION={connection}")
    };
    assert_eq!(
        (from, to, own_port),
        (&*client.v4().to_string(), &*server.v4().to_string(), "22")
    );
    let line = assert_tunnelled(&bed, client, server, server.at(PORT));
    assert_eq!(
        line.get("source.addr"),
        format!("{from}:{port}"),
        "one truth on all sides"
    );

    let original: PathBuf = dir.join("original");
    let noise = noise_file(&original, 20).unwrap();
    let remote = |name: &str| format!("root@{}:{}", server.v4(), text(&dir.join(name)));
    scp(client, &dir, text(&original), &remote("uploaded")).unwrap();
    scp(client, &dir, &remote("uploaded"), text(&dir.join("back"))).unwrap();
    for name in ["uploaded", "back"] {
        assert_eq!(
            digest(&mut fs::File::open(dir.join(name)).unwrap()).unwrap(),
            noise,
            "{name}"
        );
    }
    let mut cat = ssh(client, &dir, server, &format!("cat {}", text(&original)));
    assert_eq!(digest_of_output(&mut cat).unwrap(), noise, "cat");
}

//! The CA's root is changed in steps, and whatever is killed meanwhile, nothing is lost and the same command goes on.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use adit_tests::bed::process::binary;
use adit_tests::bed::wait_for;

const MESH: &str = "trustDomain: cluster.local\nclusterRanges: [10.0.0.0/8]\nworkloads: []\n";

/// An authority's folder, and where it listens when it runs.
struct Authority {
    folder: tempfile::TempDir,
    listen: String,
    health: String,
    running: Option<Child>,
}

impl Authority {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("mesh.yaml"), MESH).unwrap();
        let free = || {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            listener.local_addr().unwrap().to_string()
        };
        Self {
            listen: free(),
            health: free(),
            folder,
            running: None,
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn start(&mut self) {
        let mut command = Command::new(binary().unwrap());
        command
            .args(["ca", "--listen", &self.listen, "--health", &self.health, "--dir"])
            .arg(self.file("ca"))
            .arg("--mesh-file")
            .arg(self.file("mesh.yaml"))
            .arg("--jwks")
            .arg(self.file("jwks.json"))
            .stdin(Stdio::null())
            .stderr(
                File::options()
                    .create(true)
                    .append(true)
                    .open(self.file("log"))
                    .unwrap(),
            );
        self.running = Some(command.spawn().unwrap());
        wait_for("the authority to listen", Duration::from_secs(10), || {
            Ok(TcpStream::connect(&self.listen).is_ok())
        })
        .unwrap_or_else(|error| panic!("{error:#}:\n{}", fs::read_to_string(self.file("log")).unwrap()));
    }

    fn kill(&mut self) {
        if let Some(mut running) = self.running.take() {
            running.kill().unwrap();
            running.wait().unwrap();
        }
    }

    fn rotate(&self, words: &[&str]) -> Command {
        let mut command = Command::new(binary().unwrap());
        command
            .args(["ca", "rotate"])
            .args(words)
            .arg("--dir")
            .arg(self.file("ca"));
        command.stdin(Stdio::null());
        command
    }

    fn roots(&self) -> Vec<String> {
        let bundle = fs::read_to_string(self.file("ca/root.pem")).unwrap();
        let mut roots: Vec<String> = bundle
            .split_inclusive("-----END CERTIFICATE-----\n")
            .map(str::to_owned)
            .collect();
        roots.retain(|root| root.contains("BEGIN CERTIFICATE"));
        roots
    }
}

impl Drop for Authority {
    fn drop(&mut self) {
        self.kill();
    }
}

fn said(output: &Output) -> String {
    [&output.stdout[..], &output.stderr]
        .map(String::from_utf8_lossy)
        .concat()
}

#[test]
fn whatever_is_killed_while_the_root_is_changed_the_same_command_goes_on() {
    let mut authority = Authority::new();
    authority.start();
    let mut ever: BTreeSet<String> = authority.roots().into_iter().collect();
    assert_eq!(ever.len(), 1);
    let mut changes = 0;
    // With an authority that runs and is killed, and without one, where the command is killed.
    for runs in [true, false] {
        changes += 1;
        for (words, roots) in [
            (&["publish"][..], 2),
            (&["sign", "--force"], 2),
            (&["retire", "--force"], 1),
        ] {
            for attempt in 0..5 {
                let mut command = authority
                    .rotate(words)
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .spawn()
                    .unwrap();
                let span = if runs { 150 } else { 4 };
                std::thread::sleep(Duration::from_millis(attempt * span));
                match runs {
                    true => authority.kill(),
                    false => command.kill().unwrap(),
                }
                command.kill().unwrap();
                command.wait().unwrap();
                if runs {
                    authority.start();
                }
                let now = authority.roots();
                assert!((1..=2).contains(&now.len()));
                ever.extend(now);
            }
            let output = authority.rotate(words).output().unwrap();
            assert!(output.status.success(), "{words:?}: {}", said(&output));
            let now = authority.roots();
            assert_eq!(now.len(), roots, "{words:?}: {}", said(&output));
            ever.extend(now);
            assert_eq!(ever.len(), 1 + changes, "{words:?}: one new root for each change");
        }
        authority.kill();
    }
    authority.start();
    assert_eq!(authority.roots().len(), 1);
    // No key of before is left lying about.
    assert!(!authority.file("ca/root.key").exists());
}

#[test]
fn a_step_that_is_too_early_is_refused_and_the_status_says_when_it_is_due() {
    let mut authority = Authority::new();
    authority.start();
    let run = |words: &[&str]| authority.rotate(words).output().unwrap();
    assert!(run(&["publish"]).status.success());
    let early = run(&["sign"]);
    assert!(
        !early.status.success() && said(&early).contains("not before"),
        "{}",
        said(&early)
    );
    let status = said(&run(&["status"]));
    assert!(
        status.starts_with("published") && status.contains("next: sign from 20"),
        "{status}"
    );

    let mut ask = Command::new(binary().unwrap());
    let json = ask
        .args(["ca", "status", "--json", "--address", &authority.health])
        .output()
        .unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["roots"].as_array().map(Vec::len), Some(2), "{json}");
    assert_eq!(
        (&json["keys"]["phase"], &json["keys"]["next"]),
        (&"published".into(), &"sign".into())
    );
    let mut ask = Command::new(binary().unwrap());
    let text = said(
        &ask.args(["ca", "status", "--address", &authority.health])
            .output()
            .unwrap(),
    );
    assert!(
        text.contains("signs") && text.contains("trusted") && text.contains("granted"),
        "{text}"
    );
    assert!(run(&["cancel"]).status.success());
    assert_eq!(authority.roots().len(), 1);
}

//! The test programs: building them, finding them in cargo's messages, running them.

use std::{
    io::{Read as _, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::{
    context::{Context, say, seconds},
    process::{cargo, command},
    test::totals::{Counter, Totals},
};

/// A test program that cargo built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    /// The target's name, such as `adit` or `behaviour`.
    pub(crate) name: String,
    /// An integration test: it needs root, the test servers and the binary `adit`.
    pub(crate) is_integration: bool,
    pub(crate) executable: PathBuf,
    /// Its package's folder, where it expects to be started.
    pub(crate) folder: PathBuf,
}

/// Builds the test programs of all host crates and lists them.
pub(crate) fn build(context: &Context) -> Result<Vec<Program>> {
    let mut cargo = cargo(context);
    cargo.args(["test", "--release", "--no-run", "--workspace", "--exclude", "adit-ebpf"]);
    // Not the other binaries: they hold no tests, and linking each of them takes as long as the library.
    cargo.args([
        "--lib",
        "--bin",
        "xtask",
        "--test",
        "*",
        "--message-format",
        "json-render-diagnostics",
    ]);
    let output = cargo
        .stderr(Stdio::inherit())
        .output()
        .context("starting cargo test --no-run")?;
    if !output.status.success() {
        bail!("building the tests failed: {}", output.status);
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    Ok(messages.lines().filter_map(program).collect())
}

/// Reads one of cargo's messages.
fn program(message: &str) -> Option<Program> {
    let message: Value = serde_json::from_str(message).ok()?;
    if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
        return None;
    }
    let target = &message["target"];
    Some(Program {
        name: target["name"].as_str()?.to_owned(),
        is_integration: target["kind"].as_array()?.iter().any(|kind| kind == "test"),
        executable: message["executable"].as_str()?.into(),
        folder: Path::new(message["manifest_path"].as_str()?).parent()?.to_path_buf(),
    })
}

impl Program {
    /// The program with the names to run as its arguments.
    pub(crate) fn command(&self, context: &Context, names: &[String]) -> Command {
        let mut command = command(context, &self.executable);
        command.current_dir(&self.folder).args(names);
        command
    }
}

/// Runs a test program with its output shown as it comes, and counts its results.
pub(crate) fn run(name: &str, command: &mut Command) -> Result<Totals> {
    say(&format!("==> tests: {name}"));
    let start = Instant::now();
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting the tests {name}"))?;
    let mut stdout = child.stdout.take().context("the test program has no output")?;
    let mut counter = Counter::default();
    let mut buffer = [0; 8192];
    loop {
        let length = stdout
            .read(&mut buffer)
            .with_context(|| format!("reading from the tests {name}"))?;
        if length == 0 {
            break;
        }
        counter.feed(&buffer[..length]);
        let mut out = std::io::stdout().lock();
        let _ = out.write_all(&buffer[..length]).and_then(|()| out.flush());
    }
    let status = child.wait().with_context(|| format!("waiting for the tests {name}"))?;
    let totals = counter.finish(status.success());
    if !status.success() {
        say(&format!("    the tests {name} ended with {status}"));
    }
    say(&format!("    {name}: {totals} ({})", seconds(start.elapsed())));
    Ok(totals)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_read_from_cargos_messages() {
        let message = r#"{"reason":"compiler-artifact","manifest_path":"/w/tests/Cargo.toml",
            "target":{"kind":["test"],"name":"behaviour"},"profile":{"test":true},"executable":"/t/behaviour-1"}"#;
        let expected = Program {
            name: "behaviour".into(),
            is_integration: true,
            executable: "/t/behaviour-1".into(),
            folder: "/w/tests".into(),
        };
        assert_eq!(program(message), Some(expected));
    }

    #[test]
    fn libraries_and_other_messages_are_passed_over() {
        let library = r#"{"reason":"compiler-artifact","manifest_path":"/w/proxy/Cargo.toml",
            "target":{"kind":["lib"],"name":"adit"},"profile":{"test":false},"executable":null}"#;
        assert_eq!(program(library), None);
        assert_eq!(program(r#"{"reason":"build-finished","success":true}"#), None);
        assert_eq!(program("running 3 tests"), None);
    }
}

//! Where things are, and how a step is announced.

use std::{
    env, fs,
    io::Write as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};

/// The folders that every task works with.
#[derive(Clone, Debug)]
pub(crate) struct Context {
    /// The workspace's top level.
    pub(crate) root: PathBuf,
    /// Cargo's target folder: `CARGO_TARGET_DIR`, else `target` in the workspace.
    pub(crate) target: PathBuf,
    /// Where the release build puts its programs: below the target folder, by the host's name.
    pub(crate) programs: PathBuf,
    /// What outlives a checkout: `ADIT_CACHE`, else `~/.cache/adit`. Nothing in it is needed, all of it saves time.
    pub(crate) cache: PathBuf,
}

impl Context {
    /// Reads the environment.
    pub(crate) fn from_environment() -> Result<Context> {
        // The variable at run time before the one at build time: a target folder may be shared by several checkouts.
        let manifest = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let root = Path::new(&manifest)
            .parent()
            .context("xtask lies outside a workspace")?
            .to_path_buf();
        let here = env::current_dir().context("reading the current folder")?;
        let target = env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |path| here.join(path));
        // Built as they are, so in the same folder.
        let own = env::current_exe().context("finding this program's own file")?;
        let programs = own.parent().context("this program has no folder")?.to_path_buf();
        let cache = match env::var_os("ADIT_CACHE").filter(|path| !path.is_empty()) {
            Some(path) => here.join(path),
            None => Path::new(&env::var_os("HOME").context("neither ADIT_CACHE nor HOME is set")?).join(".cache/adit"),
        };
        fs::create_dir_all(&cache).with_context(|| format!("making the cache folder {}", cache.display()))?;
        Ok(Context {
            root,
            target,
            programs,
            cache,
        })
    }

    /// The kernel programs, which the binary `adit` embeds.
    pub(crate) fn bpf_object(&self) -> PathBuf {
        self.target.join("bpf/adit.bpf.o")
    }

    /// A binary of the release build.
    pub(crate) fn release(&self, name: &str) -> PathBuf {
        self.programs.join(name)
    }
}

/// Announces `title`, runs `work`, and says how long it took.
pub(crate) fn step<T>(title: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    say(&format!("==> {title}"));
    let start = Instant::now();
    let outcome = work();
    let verb = if outcome.is_ok() { "done" } else { "failed" };
    say(&format!("    {verb}: {title} ({})", seconds(start.elapsed())));
    outcome
}

/// Prints a line at once, also when standard output is a file or a pipe.
pub(crate) fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A reader that went away must not end a build.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// `3.4 s`, `2 min 05 s`.
pub(crate) fn seconds(duration: Duration) -> String {
    let whole = duration.as_secs();
    if whole < 60 {
        format!("{:.1} s", duration.as_secs_f64())
    } else {
        format!("{} min {:02} s", whole / 60, whole % 60)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_well() {
        assert_eq!(seconds(Duration::from_millis(1_240)), "1.2 s");
        assert_eq!(seconds(Duration::from_secs(125)), "2 min 05 s");
    }
}

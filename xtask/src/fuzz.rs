//! `fuzz`: the promises of `proxy/src/fuzzing.rs`, held against inputs that libFuzzer thinks of.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Mutex,
    thread,
};

use anyhow::{Context as _, Result, anyhow, bail};

use crate::{
    bpf,
    context::{Context, say, step},
    packages::{self, Need},
    process::{cargo, command, run as run_command},
    test::{self, totals::Totals},
};

/// How long each target is fuzzed where nobody says, in seconds.
const SECONDS: u32 = 10;

/// What libFuzzer is compiled with.
const COMPILER: Need = Need {
    probe: "c++",
    package: "g++",
};

/// Coverage as libFuzzer reads it, without a sanitizer: those need a nightly compiler, and safe code has little for them to
/// find. As flags of the environment these replace the configuration's, so that this is no static program.
const FLAGS: [&str; 6] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Ccodegen-units=16",
];

/// Bounds of each input: bytes, seconds, and MiB of memory.
const BOUNDS: [&str; 3] = ["-max_len=8192", "-timeout=10", "-rss_limit_mb=2048"];

/// How much of the fuzzer's log is shown where a promise is broken.
const LAST_LINES: usize = 30;

/// What to fuzz.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only these targets; each has a folder in `tests/fuzz/corpus`
    targets: Vec<String>,
    /// How long each target is fuzzed
    #[arg(long, default_value_t = SECONDS)]
    seconds: u32,
    /// Take what has been found since into `tests/fuzz/corpus`, as few inputs as reach all that all of them reach
    #[arg(long)]
    keep: bool,
    /// Instead of fuzzing: run one target on the input in this file
    #[arg(long, value_name = "FILE")]
    input: Option<PathBuf>,
}

/// Runs the task.
pub(crate) fn run_task(context: &Context, options: &Options) -> Result<ExitCode> {
    if let Some(input) = &options.input {
        let [target] = &options.targets[..] else {
            bail!("--input is for one target: cargo xtask fuzz TARGET --input FILE");
        };
        let input = std::env::current_dir()?.join(input);
        let fuzzer = Fuzzer::build(context)?;
        run_command(fuzzer.command(fuzzer.target(target)?).arg(input))?;
        return Ok(ExitCode::SUCCESS);
    }
    let totals = run(context, &options.targets, options.seconds)?;
    if options.keep {
        let fuzzer = Fuzzer::build(context)?;
        for target in fuzzer.chosen(&options.targets)? {
            step(&format!("keep inputs of {target}"), || fuzzer.keep(target))?;
        }
    }
    Ok(test::report(totals))
}

/// Fuzzes each target for so many seconds, on all cores. Each is one that has passed or failed.
fn run(context: &Context, targets: &[String], seconds: u32) -> Result<Totals> {
    let fuzzer = Fuzzer::build(context)?;
    let mut chosen = fuzzer.chosen(targets)?;
    chosen.reverse();
    say(&format!("==> fuzz {} targets, each for {seconds} s", chosen.len()));
    let (left, totals) = (Mutex::new(chosen), Mutex::new(Totals::default()));
    let work = || -> Result<()> {
        // The lock is held for taking the next, not for fuzzing it.
        let next = || left.lock().map(|mut left| left.pop()).unwrap_or_default();
        while let Some(target) = next() {
            let one = fuzzer.fuzz(target, seconds)?;
            *totals.lock().map_err(|_| anyhow!("a fuzzing thread panicked"))? += one;
        }
        Ok(())
    };
    let cores = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, Result<()>>| {
            thread.join().map_err(|_| anyhow!("a fuzzing thread panicked"))?
        };
        threads.into_iter().try_for_each(join)
    })?;
    totals.into_inner().map_err(|_| anyhow!("a fuzzing thread panicked"))
}

/// The program, and where its files are.
struct Fuzzer<'a> {
    context: &'a Context,
    program: PathBuf,
    folder: PathBuf,
    targets: Vec<String>,
}

impl<'a> Fuzzer<'a> {
    /// Builds it, in a target folder of its own: its flags are other ones than those of all other builds.
    fn build(context: &'a Context) -> Result<Self> {
        packages::ensure(context, "the fuzzer", &[COMPILER])?;
        // The crate `adit` wants the object to embed, also where nothing loads it.
        bpf::build(context)?;
        let folder = context.target.join("fuzz");
        step("build the fuzzer", || {
            let mut cargo = cargo(context);
            cargo.args(["build", "--release", "--manifest-path", "tests/fuzz/Cargo.toml"]);
            cargo
                .env("CARGO_TARGET_DIR", &folder)
                .env("ADIT_BPF_OBJECT", context.bpf_object())
                .env("RUSTFLAGS", FLAGS.join(" "));
            run_command(&mut cargo)
        })?;
        // As with all programs, below the host's name.
        let host = context.programs.parent().and_then(Path::file_name);
        let host = host.context("this program does not lie in the release folder of a host")?;
        let corpus = context.root.join(KEPT);
        let mut targets = Vec::new();
        for entry in fs::read_dir(&corpus).with_context(|| format!("reading {}", corpus.display()))? {
            targets.extend(entry?.file_name().into_string().ok());
        }
        targets.sort();
        Ok(Self {
            context,
            program: folder.join(host).join("release/adit-fuzz"),
            folder,
            targets,
        })
    }

    fn target(&self, name: &str) -> Result<&str> {
        let found = self.targets.iter().find(|target| *target == name);
        found
            .map(String::as_str)
            .with_context(|| format!("there is no target {name}; there are {}", self.targets.join(", ")))
    }

    /// Those that are named, or all.
    fn chosen(&self, names: &[String]) -> Result<Vec<&str>> {
        let names = if names.is_empty() { &self.targets } else { names };
        names.iter().map(|name| self.target(name)).collect()
    }

    fn command(&self, target: &str) -> std::process::Command {
        let mut command = command(self.context, &self.program);
        command.env("ADIT_FUZZ_TARGET", target).args(BOUNDS);
        command
    }

    /// The inputs that come with the source.
    fn kept(&self, target: &str) -> PathBuf {
        self.context.root.join(KEPT).join(target)
    }

    /// Those that were found on this machine, which each run goes on from.
    fn found(&self, target: &str) -> Result<PathBuf> {
        let folder = self.context.cache.join("fuzz").join(target);
        fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        Ok(folder)
    }

    fn fuzz(&self, target: &str, seconds: u32) -> Result<Totals> {
        let path = self.folder.join(format!("{target}.log"));
        let log = File::create(&path).with_context(|| format!("making {}", path.display()))?;
        let mut command = self.command(target);
        command
            .arg(format!("-max_total_time={seconds}"))
            .arg("-print_final_stats=1")
            .arg(format!("-artifact_prefix={}/{target}-", self.folder.display()))
            .args([self.found(target)?, self.kept(target)])
            .stdout(log.try_clone().context("sharing the log")?)
            .stderr(log);
        let status = command
            .status()
            .with_context(|| format!("starting the fuzzer for {target}"))?;
        let log = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        let log = String::from_utf8_lossy(&log);
        if status.success() {
            let inputs = after(&log, "stat::number_of_executed_units:").unwrap_or("no number of");
            say(&format!("    {target}: {inputs} inputs, every promise kept"));
            return Ok(Totals {
                passed: 1,
                ..Totals::default()
            });
        }
        let lines: Vec<_> = log.lines().collect();
        say(&lines[lines.len().saturating_sub(LAST_LINES)..].join("\n"));
        say(&format!(
            "    {target}: the fuzzer ended with {status}; its log is {}",
            path.display()
        ));
        if let Some(input) = after(&log, "Test unit written to ") {
            say(&format!(
                "    the input is {input}; again: cargo xtask fuzz {target} --input {input}"
            ));
        }
        Ok(Totals::ONE_FAILURE)
    }

    fn keep(&self, target: &str) -> Result<()> {
        let mut command = self.command(target);
        command.arg("-merge=1").args([self.kept(target), self.found(target)?]);
        command.stderr(std::process::Stdio::null());
        run_command(&mut command)
    }
}

/// Where the inputs lie that come with the source: a folder for each target.
const KEPT: &str = "tests/fuzz/corpus";

/// The rest of the line that has these words in it.
fn after<'a>(log: &'a str, words: &str) -> Option<&'a str> {
    let line = log.lines().find_map(|line| line.split_once(words))?;
    Some(line.1.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_fuzzer_says_is_found_in_its_log() {
        let log =
            "#1 INITED\nartifact_prefix='/t/'; Test unit written to /t/crash-1\nstat::number_of_executed_units: 42\n";
        assert_eq!(after(log, "Test unit written to "), Some("/t/crash-1"));
        assert_eq!(after(log, "stat::number_of_executed_units:"), Some("42"));
        assert_eq!(after("", "x"), None);
    }
}

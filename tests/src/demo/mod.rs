//! The demo: Adit's main job on two nodes of this machine, step by step, with what each party really saw.

mod authority;
mod cluster;
mod http;
mod keep;
mod kernel;
mod outage;
mod report;
mod steps;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use self::report::Report;
use self::world::World;
use crate::bed::residue;
use crate::sys::{check_interrupt, note_interrupts};

/// Show Adit's main job: two nodes and their pods as namespaces of this machine, real traffic between them, and what each
/// party saw of it. Needs root; leaves nothing behind.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask demo", bin_name = "cargo xtask demo")]
struct Options {
    /// Show it on a real Kubernetes cluster of two nodes instead: installed by Helm, and uninstalled
    #[arg(long, conflicts_with = "keep")]
    cluster: bool,
    /// Leave it up at the end, with commands to try, until Enter or Ctrl-C
    #[arg(long)]
    keep: bool,
    /// Also write the checks to FILE: {"checks":[{"name","ok","detail"}]}
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Runs the demo as the command line says.
pub fn main() -> ExitCode {
    let options = Options::parse();
    match run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether all checks hold.
fn run(options: &Options) -> anyhow::Result<bool> {
    note_interrupts()?;
    let mut report = Report::new();
    let mut prefix = None;
    let shown = if options.cluster {
        cluster::show(&mut report)
    } else {
        show(options, &mut report, &mut prefix)
    };
    if let Some(prefix) = prefix {
        let left = residue(&prefix);
        let detail = if left.is_empty() {
            "no namespace, cgroup, pinned program or process is left".to_owned()
        } else {
            left.join(", ")
        };
        report.heading("Clean-up");
        report.check("nothing is left behind", left.is_empty(), detail);
    }
    report.summary();
    // What held before an error is written too.
    if let Some(path) = &options.json {
        report.write_json(path)?;
    }
    shown?;
    Ok(report.all_hold())
}

/// All steps but the last look. What was made is gone when this returns.
fn show(options: &Options, report: &mut Report, prefix: &mut Option<String>) -> anyhow::Result<()> {
    let world = World::start(report, prefix)?;
    for (title, step) in steps::ALL {
        check_interrupt()?;
        report.heading(title);
        if let Err(error) = step(&world, report) {
            check_interrupt()?;
            report.check(
                &format!("{} can be shown", title.to_lowercase()),
                false,
                format!("{error:#}"),
            );
            world.bed.print_logs();
        }
    }
    if options.keep {
        keep::wait(&world, report)?;
    }
    Ok(())
}

//! Adit's developer tasks: `cargo xtask TASK`, `cargo xtask --help` lists them.

mod apps;
mod bpf;
mod build;
mod ci;
mod cluster;
mod context;
mod fuzz;
mod go;
mod image;
mod lint;
mod packages;
mod process;
mod spire;
mod test;
mod vm;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::context::Context;

/// Adit's developer tasks.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Build the kernel programs into `target/bpf/adit.bpf.o`; finds or installs a toolchain that can
    BuildEbpf,
    /// Build the kernel programs, then everything else, in release mode
    Build,
    /// Make the container image as an archive, `target/image/adit-VERSION.tar`
    Image(image::Options),
    /// Check formatting and run clippy with warnings denied, on every crate
    Lint,
    /// Run unit tests, integration tests (as root), and the latter on other kernels
    Test(test::Selection),
    /// Run integration tests on Debian's kernels in virtual machines
    Vm(vm::Selection),
    /// A Kubernetes cluster of two nodes on this machine: bring it up, use it, test on it
    Cluster(cluster::Arguments),
    /// Find or build the SPIRE server and agent that tests run against
    Spire,
    /// Hold what the proxy promises of untrusted input against inputs that a fuzzer thinks of
    Fuzz(fuzz::Options),
    /// Run lint and all tests
    Ci,
    /// Show the main job on two nodes: arguments go to the demo (`--keep`, `--json FILE`)
    #[command(disable_help_flag = true)]
    Demo(apps::Passthrough),
    /// Measure plain TCP and Adit side by side: arguments go to the bench (`--quick`, `--json FILE`)
    #[command(disable_help_flag = true)]
    Bench(apps::Passthrough),
}

fn main() -> ExitCode {
    match run(Cli::parse().task) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<ExitCode> {
    let context = Context::from_environment()?;
    match task {
        Task::BuildEbpf => bpf::build(&context)?,
        Task::Build => {
            build::everything(&context)?;
            context::say(&format!("built {}", context.release("adit").display()));
        }
        Task::Image(options) => image::make(&context, &options)?,
        Task::Lint => lint::run(&context)?,
        Task::Test(selection) => return Ok(test::report(test::run(&context, &selection)?)),
        Task::Vm(selection) => return Ok(test::report(vm::run(&context, &selection)?)),
        Task::Cluster(arguments) => return cluster::run_task(&context, &arguments),
        Task::Spire => spire::run_task(&context)?,
        Task::Fuzz(options) => return fuzz::run_task(&context, &options),
        Task::Ci => return Ok(test::report(ci::run(&context))),
        Task::Demo(arguments) => return apps::run(&context, "adit-demo", &arguments),
        Task::Bench(arguments) => return apps::run(&context, "adit-bench", &arguments),
    }
    Ok(ExitCode::SUCCESS)
}

//! The `adit` binary: reads the command line and runs what it asks for.

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

use adit::cli::{self, CliError, Hardening, Invocation, LogSettings};

fn main() -> ExitCode {
    match cli::parse(std::env::args_os()) {
        Ok(invocation) => match run(invocation) {
            Ok(code) => code,
            Err(error) => {
                complain(error.as_ref());
                ExitCode::FAILURE
            }
        },
        Err(error) => {
            match &error {
                // clap's own rendering: usage, and colours where there is a terminal.
                CliError::Usage(error) => drop(error.print()),
                error => complain(error),
            }
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(invocation: Invocation) -> anyhow::Result<ExitCode> {
    match invocation {
        Invocation::Node(settings) => {
            start(&settings.log);
            if let Err(error) = adit::steer::enter_host_cgroup_namespace() {
                tracing::warn!(%error, "cgroups are seen as this process's own namespace of them shows them");
            }
            control_runtime()?.block_on(cli::node::run(*settings))?;
        }
        Invocation::Uninstall(what) => {
            start(&what.log);
            control_runtime()?.block_on(cli::uninstall(what))?;
        }
        Invocation::Ca(args) => {
            start(&args.log());
            control_runtime()?.block_on(cli::run_ca(*args))?;
        }
        Invocation::Probe(args) => {
            writeln!(std::io::stdout(), "{}", cli::probe(&args)?)?;
        }
        Invocation::Certs(args) => {
            writeln!(std::io::stdout(), "{}", cli::certs(&args)?)?;
        }
        Invocation::Check(args) => {
            // Findings tell it where that matters.
            let _ = adit::steer::enter_host_cgroup_namespace();
            if !control_runtime()?.block_on(cli::check(*args))? {
                return Ok(ExitCode::FAILURE);
            }
        }
        Invocation::Leave(args) => {
            start(&args.log());
            control_runtime()?.block_on(cli::run_leave(*args))?;
        }
        Invocation::Version => {
            writeln!(std::io::stdout(), "{}", cli::version())?;
        }
        Invocation::SelfTestConnect => adit::node::self_test_connect()?,
        Invocation::CaptureTest { cgroup, to } => adit::node::capture_test_connect(&cgroup, to)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn start(log: &LogSettings) {
    let Hardening { open_files, undumpable } = cli::prepare_process();
    cli::init_logging(log);
    match open_files {
        Ok(limit) => tracing::debug!(limit, "open files"),
        Err(error) => tracing::warn!(%error, "cannot raise the limit of open files; the soft limit stays"),
    }
    if let Err(error) = undumpable {
        tracing::warn!(%error, "cannot keep keys out of core dumps");
    }
}

/// Threads for what waits for the kernel: more than there is of that at a time, except where many pods come at once. Each
/// that there is stays, as all take turns, and holds on to memory.
const BLOCKING_THREADS: usize = 8;

/// One thread for what is not carrying bytes: sources, certificates, the admin page. The data plane brings its own.
fn control_runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .max_blocking_threads(BLOCKING_THREADS)
        .enable_all()
        .build()
}

/// Prints an error and what caused it on one line.
fn complain(error: &dyn Error) {
    eprintln!("adit: {}", cli::chain(error));
}

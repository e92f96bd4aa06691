//! The bench: plain TCP and Adit interleaved in one run over the same bed. `docs/performance.md` tells the method.

mod addresses;
mod ca;
mod change;
mod crowd;
mod hooks;
pub(crate) mod load;
mod memory;
mod report;
mod scale;
mod start;
mod traffic;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::ensure;
use clap::Parser;

use self::report::Row;
use crate::bed::BedBuilder;
use crate::sys::{check_interrupt, note_interrupts};

/// Measure plain TCP and Adit side by side and print a table: medians, least and greatest of the rounds, and the ratio
/// of Adit to plain TCP. Needs root.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench")]
struct Options {
    /// Fewer and shorter rounds: under 4 minutes instead of some 10
    #[arg(long)]
    quick: bool,
    /// Also write the medians to FILE: {"rows":[{"name","unit","plain","adit","ratio"}]}
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure these rows only
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// Measure a large Kubernetes cluster instead: the rows whose names begin with scale_; some 12 minutes
    #[arg(long, conflicts_with_all = ["quick", "node_args", "rounds"])]
    cluster: bool,
    /// More arguments for every `adit node`, separated by spaces
    #[arg(long, value_name = "ARGUMENTS", default_value = "", allow_hyphen_values = true)]
    node_args: String,
    /// How many rounds of each row, instead of 7 (quick) or 9
    #[arg(long, value_name = "COUNT")]
    rounds: Option<usize>,
}

/// The rows on the two nodes with traffic, in the order in which they are measured: memory first, from a proxy that has
/// done nothing yet.
const NAMES: &[&str] = &[
    "rss_idle_kib",
    "rss_per_connection_kib",
    "cross_bulk_1",
    "cross_bulk_8",
    "cross_cpu_s_per_gb",
    "cross_pingpong_1_p50_us",
    "cross_pingpong_16_tps",
    "pingpong_beside_bulk_p50_us",
    "cross_connect_1",
    "cross_connect_16",
    "same_bulk_1",
    "same_bulk_8",
    "same_pingpong_16_tps",
    "same_connect_1",
    "same_connect_16",
    "egress_bulk_1",
    "egress_connect_16",
    "plaintext_in_bulk_1",
    "service_connect_16",
    "connect_hook_ns",
    "connect_hook_outside_ns",
    "rss_after_load_ratio",
];

/// Beyond this share of the CPUs' time, something else runs beside the bench.
const BUSY: f64 = 0.15;

/// Runs the bench as the command line says.
pub fn main() -> ExitCode {
    let options = Options::parse();
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> anyhow::Result<()> {
    let names = match options.cluster {
        true => scale::names(),
        false => [
            start::NAMES,
            change::NAMES,
            crowd::NAMES,
            addresses::NAMES,
            ca::NAMES,
            NAMES,
        ]
        .concat(),
    };
    if let Some(unknown) = options.only.iter().find(|name| !names.contains(&name.as_str())) {
        anyhow::bail!("there is no row {unknown}; the rows are {}", names.join(", "));
    }
    note_interrupts()?;
    let begin = Instant::now();
    let mut bench = Bench {
        only: options.only.clone(),
        cluster: options.cluster,
        quick: options.quick,
        rounds: options.rounds.unwrap_or(if options.quick { 7 } else { 9 }).max(1),
        time: Duration::from_millis(if options.quick { 500 } else { 1500 }),
        node_arguments: options.node_args.split_whitespace().map(str::to_owned).collect(),
        rows: Vec::new(),
        notes: Vec::new(),
    };
    if !bench.cluster {
        println!(
            "plain TCP and Adit in turns, {} rounds of {} ms each; the figures are medians\n",
            bench.rounds,
            bench.time.as_millis()
        );
    }
    if let Some(share) = busy_share(Duration::from_millis(300)).filter(|share| *share > BUSY) {
        bench.note(format!(
            "the machine was {:.0} % busy with other work at the start: the figures are disturbed",
            share * 100.0
        ));
    }
    println!("{}", report::head());
    let outcome = bench.measure();
    for note in &bench.notes {
        println!("{note}");
    }
    println!("\n{} rows in {:.0} s", bench.rows.len(), begin.elapsed().as_secs_f64());
    // What was measured before an error is written too.
    if let Some(path) = &options.json {
        report::write_json(path, &bench.rows)?;
    }
    outcome?;
    let missing: Vec<_> = bench
        .rows
        .iter()
        .filter(|row| !row.is_measured())
        .map(|row| row.name)
        .collect();
    ensure!(missing.is_empty(), "no round succeeded of: {}", missing.join(", "));
    Ok(())
}

/// The share of all CPUs' time that is used while this process waits.
fn busy_share(wait: Duration) -> Option<f64> {
    let before = cpu_times()?;
    std::thread::sleep(wait);
    let after = cpu_times()?;
    let [idle, total] = [after[0] - before[0], after[1] - before[1]];
    (total > 0.0).then(|| 1.0 - idle / total)
}

/// Idle and all time of all CPUs, in ticks.
fn cpu_times() -> Option<[f64; 2]> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    let fields = text.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
    // user nice system idle iowait irq softirq steal; what follows is counted in them already.
    let ticks: Vec<f64> = fields.take(8).filter_map(|field| field.parse().ok()).collect();
    let idle = ticks.get(3)? + ticks.get(4)?;
    Some([idle, ticks.iter().sum()])
}

/// A run of the bench.
struct Bench {
    only: Vec<String>,
    cluster: bool,
    quick: bool,
    rounds: usize,
    time: Duration,
    node_arguments: Vec<String>,
    rows: Vec<Row>,
    notes: Vec<String>,
}

impl Bench {
    fn measure(&mut self) -> anyhow::Result<()> {
        if self.cluster {
            return scale::measure(self);
        }
        if self.wants_any(start::NAMES) {
            start::measure(self)?;
        }
        if self.wants_any(change::NAMES) {
            change::measure(self)?;
        }
        if self.wants_any(crowd::NAMES) {
            crowd::measure(self)?;
        }
        if self.wants_any(addresses::NAMES) {
            addresses::measure(self)?;
        }
        if self.wants_any(ca::NAMES) {
            ca::measure(self)?;
        }
        if self.wants_any(NAMES) {
            let world = traffic::World::start(self)?;
            let idle = memory::idle(self, &world)?;
            memory::per_connection(self, &world)?;
            traffic::measure(self, &world)?;
            hooks::measure(self, &world)?;
            memory::after_load(self, &world, idle)?;
        }
        Ok(())
    }

    fn wants_any(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.wants(name))
    }

    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|wanted| wanted == name)
    }

    /// Takes a row in, unless it was not asked for.
    fn add(&mut self, row: Row) {
        if self.wants(row.name) {
            println!("{}", row.line());
            self.rows.push(row);
        }
    }

    fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    fn with_arguments(&self, bed: BedBuilder) -> BedBuilder {
        self.node_arguments
            .iter()
            .fold(bed, |bed, argument| bed.node_argument(argument))
    }

    /// Samples of plain TCP and of Adit, in turns and each first every other time. A round that fails is noted.
    fn in_turns(&mut self, name: &str, mut sample: impl FnMut(Side) -> anyhow::Result<f64>) -> anyhow::Result<Samples> {
        let mut samples = Samples::default();
        for round in 0..self.rounds {
            let order = if round % 2 == 0 {
                [Side::Plain, Side::Adit]
            } else {
                [Side::Adit, Side::Plain]
            };
            for side in order {
                check_interrupt()?;
                match sample(side) {
                    Ok(value) => samples.of(side).push(value),
                    Err(error) => self.note(format!("{name}, {side:?}, round {}: {error:#}", round + 1)),
                }
            }
        }
        Ok(samples)
    }
}

/// Whose turn it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Plain,
    Adit,
}

#[derive(Debug, Default)]
struct Samples {
    plain: Vec<f64>,
    adit: Vec<f64>,
}

impl Samples {
    fn of(&mut self, side: Side) -> &mut Vec<f64> {
        match side {
            Side::Plain => &mut self.plain,
            Side::Adit => &mut self.adit,
        }
    }

    fn row(&self, name: &'static str, unit: &'static str) -> Row {
        Row::new(name, unit, &self.plain, &self.adit)
    }
}

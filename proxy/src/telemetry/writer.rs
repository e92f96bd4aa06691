//! The thread that writes log lines, so that the data path never waits for whoever reads them.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, SystemTime};

use super::line::{LogFormat, Record};

/// Lines that may wait; at a usual length, some 8 MiB.
const QUEUE: usize = 8192;

enum Item {
    Line(String),
    Flush(SyncSender<()>),
}

/// Takes lines without ever blocking; one thread writes them in order.
pub(super) struct LineWriter {
    queue: SyncSender<Item>,
    lost: Arc<AtomicU64>,
    format: LogFormat,
}

impl LineWriter {
    /// Starts the thread. It ends when the writer is dropped and all lines are written.
    pub(super) fn spawn(format: LogFormat, output: Box<dyn Write + Send>) -> io::Result<Self> {
        let (queue, lines) = sync_channel(QUEUE);
        let lost = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&lost);
        thread::Builder::new()
            .name("access-log".into())
            .spawn(move || write_lines(&lines, io::BufWriter::with_capacity(64 * 1024, output), &counter, format))?;
        Ok(Self { queue, lost, format })
    }

    pub(super) fn format(&self) -> LogFormat {
        self.format
    }

    /// Hands over a line, which ends in a newline. Where the queue is full the line is lost, and counted.
    pub(super) fn send(&self, line: String) {
        if self.queue.try_send(Item::Line(line)).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Lines lost since the start, for want of room or because they could not be written.
    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Waits until all lines so far are written, or for `at_most`.
    pub(super) fn flush(&self, at_most: Duration) {
        let (done, wait) = sync_channel(1);
        let deadline = std::time::Instant::now() + at_most;
        let mut item = Item::Flush(done);
        // The standard library's queue has no sending with a deadline.
        while let Err(error) = self.queue.try_send(item) {
            match error {
                std::sync::mpsc::TrySendError::Full(back) if std::time::Instant::now() < deadline => item = back,
                _ => return,
            }
            thread::sleep(Duration::from_millis(1));
        }
        // Whether it was written in time or not, there is no more to do.
        let _ = wait.recv_timeout(deadline.saturating_duration_since(std::time::Instant::now()));
    }
}

fn write_lines(lines: &Receiver<Item>, mut output: impl Write, lost: &AtomicU64, format: LogFormat) {
    let mut told = 0;
    while let Ok(first) = lines.recv() {
        let mut next = Some(first);
        let mut waiting = Vec::new();
        let mut unflushed = 0;
        while let Some(item) = next {
            match item {
                Item::Line(line) => match output.write_all(line.as_bytes()) {
                    Ok(()) => unflushed += 1,
                    Err(_) => drop(lost.fetch_add(1, Ordering::Relaxed)),
                },
                Item::Flush(done) => waiting.push(done),
            }
            next = lines.try_recv().ok();
        }
        // The queue has run empty: whatever was lost was lost before here.
        let now = lost.load(Ordering::Relaxed);
        if now != told && output.write_all(lost_line(format, now - told).as_bytes()).is_ok() {
            told = now;
        }
        if output.flush().is_err() {
            lost.fetch_add(unflushed, Ordering::Relaxed);
        }
        for done in waiting {
            // The one who asked may have given up.
            let _ = done.send(());
        }
    }
}

fn lost_line(format: LogFormat, count: u64) -> String {
    let mut line = String::new();
    let mut record = Record::begin(&mut line, format, SystemTime::now());
    record.event("access-log-lost");
    record.number("lines", count);
    record.end();
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Condvar, Mutex};

    /// Blocks every write until it is opened.
    #[derive(Clone, Default)]
    struct Gate(Arc<(Mutex<(bool, Vec<u8>)>, Condvar)>);

    impl Gate {
        fn open(&self) {
            self.0.0.lock().unwrap().0 = true;
            self.0.1.notify_all();
        }

        fn text(&self) -> String {
            String::from_utf8(self.0.0.lock().unwrap().1.clone()).unwrap()
        }
    }

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let guard = self.0.0.lock().unwrap();
            let mut guard = self.0.1.wait_while(guard, |(open, _)| !*open).unwrap();
            guard.1.extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    const DEADLINE: Duration = Duration::from_secs(20);

    #[test]
    fn lines_come_out_in_order() {
        let gate = Gate::default();
        gate.open();
        let writer = LineWriter::spawn(LogFormat::Logfmt, Box::new(gate.clone())).unwrap();
        for n in 0..1000 {
            writer.send(format!("{n}\n"));
        }
        writer.flush(DEADLINE);
        assert_eq!(gate.text(), (0..1000).map(|n| format!("{n}\n")).collect::<String>());
    }

    #[test]
    fn a_reader_that_stalls_costs_lines_and_never_time() {
        let gate = Gate::default();
        let writer = LineWriter::spawn(LogFormat::Logfmt, Box::new(gate.clone())).unwrap();
        // Long lines, so that the thread's buffer fills and the gate holds it.
        let line = format!("{}\n", "x".repeat(1023));
        let total = 3 * QUEUE as u64;
        for _ in 0..total {
            writer.send(line.clone());
        }
        let lost = writer.lost();
        assert!(lost > 0 && lost < total, "{lost}");
        gate.open();
        writer.flush(DEADLINE);
        let text = gate.text();
        assert!(text.contains(&format!(" access-log-lost lines={lost}\n")));
        assert_eq!(text.matches(&line).count() as u64, total - lost);
    }

    #[test]
    fn an_output_that_fails_is_counted() {
        struct Broken;
        impl Write for Broken {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let writer = LineWriter::spawn(LogFormat::Json, Box::new(Broken)).unwrap();
        writer.send("x\n".into());
        writer.flush(DEADLINE);
        assert!(writer.lost() >= 1);
    }
}

//! The process's own log: one line per event on standard error, logfmt or JSON.

use std::fmt::{self, Write as _};
use std::io;
use std::time::SystemTime;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::args::LogArgs;
use super::values::LogLevel;
use crate::telemetry::{LogFormat, Record};

/// Level and form of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSettings {
    /// What is logged.
    pub level: LogLevel,
    /// How it looks.
    pub format: LogFormat,
}

impl From<LogArgs> for LogSettings {
    fn from(args: LogArgs) -> Self {
        Self {
            level: args.log_level,
            format: args.log_format,
        }
    }
}

/// Sends the log of this process to standard error. Standard output is left to the access log and to answers.
pub fn init_logging(settings: &LogSettings) {
    let filter = EnvFilter::new(settings.level.as_str());
    let format = Lines {
        format: settings.format,
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .event_format(format)
        .init();
}

/// Formats an event by the same rules as the access log: what an event quotes may come from a pod.
struct Lines {
    format: LogFormat,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut line = String::with_capacity(256);
        let mut record = Record::begin(&mut line, self.format, SystemTime::now());
        record.text("level", level(*event.metadata().level()));
        record.text("target", event.metadata().target());
        let mut fields = Fields {
            record,
            scratch: String::new(),
        };
        event.record(&mut fields);
        fields.record.end();
        writer.write_str(&line)
    }
}

fn level(level: Level) -> &'static str {
    match level {
        Level::ERROR => "error",
        Level::WARN => "warn",
        Level::INFO => "info",
        Level::DEBUG => "debug",
        Level::TRACE => "trace",
    }
}

struct Fields<'a> {
    record: Record<'a>,
    scratch: String,
}

impl Visit for Fields<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record.text(field.name(), value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.record.number(field.name(), value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.scratch.clear();
        // Writing to a String does not fail.
        let _ = write!(self.scratch, "{value:?}");
        self.record.text(field.name(), &self.scratch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};
    use tracing_subscriber::fmt::MakeWriter;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl MakeWriter<'_> for Sink {
        type Writer = Self;

        fn make_writer(&self) -> Self {
            self.clone()
        }
    }

    fn logged(format: LogFormat) -> String {
        let sink = Sink::default();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(sink.clone())
            .event_format(Lines { format })
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(pod = %"shop/a\nb", tries = 3, "cannot \"do\" it");
        });
        String::from_utf8(sink.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn an_event_is_one_line_whatever_it_quotes() {
        let line = logged(LogFormat::Logfmt);
        assert!(line.starts_with("time=2"), "{line}");
        let rest = " level=warn target=adit::cli::logging::tests message=\"cannot \\\"do\\\" it\" pod=\"shop/a\\nb\" tries=3\n";
        assert!(line.ends_with(rest), "{line}");
    }

    #[test]
    fn json_lines_parse() {
        let value: serde_json::Value = serde_json::from_str(&logged(LogFormat::Json)).unwrap();
        assert_eq!(value["level"], "warn");
        assert_eq!(value["pod"], "shop/a\nb");
        assert_eq!(value["message"], "cannot \"do\" it");
    }
}

//! CSV tables with a header. This module knows nothing of pods and nodes: it finds columns, reads
//! rows part by part, says what is wrong and where, and writes rows.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::{self, Read};

use csv::{ErrorKind, StringRecord};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde::de::value::MapDeserializer;

/// Largest file read, in bytes. The public trace has 0.7 MB per file.
const FILE_BYTES_MAX: u64 = 256 << 20;
/// Most rows read. With the ranges in [`crate::trace::read`] the sum of any column, and the
/// GPU demand of all rows, stays below 2^50.
const ROWS_MAX: usize = 1_000_000;
/// Longest line read, in bytes. A file with longer ones is no table, and would only fill memory.
const LINE_BYTES_MAX: usize = 1 << 20;
/// Longest part of a bad value that an error repeats.
const SHOWN_CHARS_MAX: usize = 40;

/// Why a trace was not read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file could not be opened.
    #[error("cannot open `{0}`")]
    Open(String, #[source] io::Error),
    /// Reading stopped in the middle: the disk failed, or a line is too long.
    #[error("cannot read `{0}`")]
    Read(String, #[source] csv::Error),
    /// A column that every trace must have is not in the header.
    #[error("`{0}` has no column `{1}`")]
    MissingColumn(String, String),
    /// It is no table of a trace: file, line and column. Lines count from 1, the header included.
    #[error("`{0}`{1}")]
    Refused(String, String),
}

impl TraceError {
    fn refused(file: &str, fault: impl Display) -> Self {
        Self::Refused(file.to_owned(), fault.to_string())
    }

    fn of_csv(file: &str, line: u64, header: &StringRecord, error: csv::Error) -> Self {
        let fault = match error.kind() {
            ErrorKind::UnequalLengths { expected_len, len, .. } => {
                format!(" line {line}: {len} values, expected {expected_len} as in the header")
            }
            ErrorKind::Utf8 { err, .. } => {
                let title = header.get(err.field()).filter(|title| !title.is_empty());
                let column = title.map(|title| format!(", column `{title}`")).unwrap_or_default();
                format!(" line {line}{column}: the text is not UTF-8")
            }
            _ => return Self::Read(file.to_owned(), error),
        };
        Self::refused(file, fault)
    }
}

/// Reads on until a line is too long, and counts lines as editors do: `csv` takes the position of a record before
/// it skips what ends the last one, and lines without a value.
struct Lines<R> {
    reader: R,
    /// The number of the line that is read, and its bytes so far.
    line: u64,
    line_bytes: usize,
    /// Bytes read, and the last one.
    bytes: u64,
    last: u8,
    /// The record that is read begins at this byte, or at the first later one in a line.
    record: u64,
    /// The first byte of lines that have any, with their numbers: what that record may begin with, and what is
    /// read ahead.
    starts: Vec<(u64, u64)>,
}

impl<R> Lines<R> {
    /// Where the record begins.
    fn start(&self) -> Option<(u64, u64)> {
        self.starts.get(self.starts.partition_point(|(at, _)| *at < self.record)).copied()
    }

    /// The line on which it begins.
    fn of_record(&self) -> u64 {
        self.start().map_or(self.line, |(_, line)| line)
    }
}

impl<R: Read> Read for Lines<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(buffer)?;
        let start = self.start();
        self.starts.clear();
        self.starts.extend(start);
        for byte in &buffer[..read] {
            if matches!(byte, b'\n' | b'\r') {
                self.line += u64::from((self.last, *byte) != (b'\r', b'\n'));
                self.line_bytes = 0;
            } else {
                if self.line_bytes == 0 {
                    self.starts.push((self.bytes, self.line));
                }
                self.line_bytes += 1;
            }
            if self.line_bytes > LINE_BYTES_MAX {
                let line = self.line;
                let why = format!("line {line} is longer than {LINE_BYTES_MAX} bytes");
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
            (self.bytes, self.last) = (self.bytes + 1, *byte);
        }
        Ok(read)
    }
}

/// A CSV file whose header has been read.
pub(crate) struct CsvTable<'f, R> {
    file: &'f str,
    reader: csv::Reader<Lines<io::Take<R>>>,
    header: StringRecord,
    /// Most rows read; less than [`ROWS_MAX`] in tests only.
    pub(crate) rows_max: usize,
}

impl<'f, R: Read> CsvTable<'f, R> {
    /// Reads the header of `reader`; `file` is its name in errors.
    pub(crate) fn new(file: &'f str, reader: R) -> Result<Self, TraceError> {
        // One byte more than allowed: at the limit it shows that the file goes on.
        let reader = reader.take(FILE_BYTES_MAX + 1);
        let (line_bytes, bytes, last, record, starts) = (0, 0, 0, 0, Vec::new());
        let lines = Lines { reader, line: 1, line_bytes, bytes, last, record, starts };
        let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(lines);
        let header = reader.headers().cloned();
        let line = reader.get_ref().of_record();
        let header =
            header.map_err(|error| TraceError::of_csv(file, line, &StringRecord::new(), error))?;
        if header.is_empty() {
            return Err(TraceError::refused(file, " holds no rows"));
        }
        Ok(Self { file, reader, header, rows_max: ROWS_MAX })
    }

    /// Whether there is a column of that title.
    pub(crate) fn has(&self, title: &str) -> bool {
        self.header.iter().any(|known| known == title)
    }

    /// Ignores the column of that title.
    pub(crate) fn ignore(&mut self, title: &str) {
        self.header =
            self.header.iter().map(|known| if known == title { "" } else { known }).collect();
    }

    /// Refuses a table that has one of these columns twice, or one of the first `required` not at all.
    pub(crate) fn check(&self, columns: &str, required: usize) -> Result<(), TraceError> {
        for (at, title) in columns.split(',').enumerate() {
            match self.header.iter().filter(|known| *known == title).count() {
                0 if at < required => {
                    return Err(TraceError::MissingColumn(self.file.to_owned(), title.to_owned()));
                }
                0 | 1 => {}
                _ => {
                    let fault = format!(" has the column `{title}` more than once");
                    return Err(TraceError::refused(self.file, fault));
                }
            }
        }
        Ok(())
    }

    /// Reads all rows; an empty file, or two rows with the same name, is an error.
    pub(crate) fn rows<T>(
        &mut self,
        read: fn(TableRow<'_>) -> Result<T, TraceError>,
        name: fn(&T) -> &str,
    ) -> Result<Vec<T>, TraceError> {
        let file = self.file;
        let (mut rows, mut first_lines) = (Vec::new(), BTreeMap::new());
        let mut record = StringRecord::new();
        loop {
            self.reader.get_mut().record = self.reader.position().byte();
            let more = self.reader.read_record(&mut record);
            let line = self.reader.get_ref().of_record();
            // First of all: a row that the limit cuts off would be called a bad one.
            if rows.len() == self.rows_max && matches!(more, Ok(true))
                || self.reader.get_ref().reader.limit() == 0
            {
                let allowed = format!("{ROWS_MAX} rows and {FILE_BYTES_MAX} bytes");
                return Err(TraceError::refused(
                    file,
                    format!(" is too large: allowed are {allowed}"),
                ));
            }
            if !more.map_err(|error| TraceError::of_csv(file, line, &self.header, error))? {
                break;
            }
            let row = read(TableRow { file, line, header: &self.header, record: record.clone() })?;
            if let Some(first_line) = first_lines.insert(name(&row).to_owned(), line) {
                let fault =
                    format!("the name `{}` was already used on line {first_line}", name(&row));
                return Err(TraceError::refused(file, format!(" line {line}: {fault}")));
            }
            rows.push(row);
        }
        match rows.is_empty() {
            true => Err(TraceError::refused(file, " holds no rows")),
            false => Ok(rows),
        }
    }
}

/// One row and its position.
pub(crate) struct TableRow<'r> {
    file: &'r str,
    line: u64,
    header: &'r StringRecord,
    record: StringRecord,
}

impl TableRow<'_> {
    /// The value in a column without the blanks around it; empty if there is no such column.
    pub(crate) fn text(&self, title: &str) -> &str {
        let at = self.header.iter().position(|known| known == title);
        at.and_then(|at| self.record.get(at)).unwrap_or_default()
    }

    /// What the columns say that `T` has; the others are ignored.
    pub(crate) fn part<T: DeserializeOwned>(&self) -> Result<T, TraceError> {
        let cells = MapDeserializer::<_, serde::de::value::Error>::new(
            self.header.iter().zip(self.record.iter()),
        );
        serde_path_to_error::deserialize(cells)
            .or_else(|error| self.refuse(&error.path().to_string(), error.inner()))
    }

    /// Refuses all values in these columns but those that say nothing, and empties them.
    pub(crate) fn refuse_all(&mut self, columns: &[&str], why: &str) -> Result<(), TraceError> {
        let telling =
            columns.iter().find(|title| !matches!(self.text(title), "" | "0" | "none" | "false"));
        if let Some(title) = telling {
            return self.refuse(title, why);
        }
        let cells = self.header.iter().zip(self.record.iter());
        let kept = cells.map(|(title, text)| if columns.contains(&title) { "" } else { text });
        self.record = kept.collect();
        Ok(())
    }

    /// The error of a value, with what its column allows.
    pub(crate) fn refuse<T>(&self, title: &str, allowed: impl Display) -> Result<T, TraceError> {
        let shown = self.text(title).chars().take(SHOWN_CHARS_MAX);
        let (line, value) = (self.line, shown.flat_map(char::escape_debug).collect::<String>());
        let fault = format!("`{value}` is not allowed, expected {allowed}");
        Err(TraceError::refused(self.file, format!(" line {line}, column `{title}`: {fault}")))
    }
}

/// A table with these columns of the rows; those after the first `required` only if a row says something there.
pub(crate) fn written<T: Serialize>(
    rows: impl Iterator<Item = T>,
    columns: &str,
    required: usize,
) -> Result<Vec<u8>, csv::Error> {
    let mut all = csv::Writer::from_writer(Vec::new());
    for row in rows {
        all.serialize(row)?;
    }
    let all = all.into_inner().map_err(|error| error.into_error())?;
    let mut all = csv::Reader::from_reader(all.as_slice());
    let header = all.headers()?.clone();
    let records: Vec<StringRecord> = all.records().collect::<Result<_, _>>()?;
    let position = |title: &str| header.iter().position(|known| known == title).unwrap_or_default();
    let says = |title: &str| records.iter().any(|record| !record[position(title)].is_empty());
    let columns = columns.split(',').enumerate();
    let kept = columns.filter(|(at, title)| *at < required || says(title)).map(|(_, title)| title);
    let kept: Vec<&str> = kept.collect();
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(&kept)?;
    for record in &records {
        writer.write_record(kept.iter().map(|title| &record[position(title)]))?;
    }
    writer.into_inner().map_err(|error| error.into_error().into())
}

package main

import (
	"io"
	"log/slog"
	"os"
)

// newLogger makes the log of a process. Levels and formats are those that the configuration allows.
func newLogger(w io.Writer, level, format string) *slog.Logger {
	var min slog.Level
	switch level {
	case "debug":
		min = slog.LevelDebug
	case "warn":
		min = slog.LevelWarn
	case "error":
		min = slog.LevelError
	default:
		min = slog.LevelInfo
	}
	options := &slog.HandlerOptions{Level: min}
	if format == "text" || format == "auto" && isTerminal(w) {
		return slog.New(slog.NewTextHandler(w, options))
	}
	return slog.New(slog.NewJSONHandler(w, options))
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

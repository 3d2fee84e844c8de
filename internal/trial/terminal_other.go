//go:build !linux && !darwin

package trial

import "os"

// terminalWidth is 0, no terminal: progress in place is drawn on Linux and macOS, elsewhere it comes in lines.
func terminalWidth(*os.File) int { return 0 }

//go:build linux || darwin

package trial

import (
	"os"

	"golang.org/x/sys/unix"
)

// terminalWidth gives the columns of a terminal; 0: it is none.
func terminalWidth(f *os.File) int {
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0
	}
	if size.Col == 0 {
		return 80 // a terminal that does not know its size
	}
	return int(size.Col)
}

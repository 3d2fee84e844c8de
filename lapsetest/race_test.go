//go:build race

package lapsetest_test

const raceDetector = true
